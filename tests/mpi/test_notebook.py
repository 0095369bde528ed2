"""The example notebook, cell by cell: a session in the kernel, and `ecrm launch` with a kill."""

import json
import re

from support.examples import EXAMPLES
from support.notebooks import executed, said
from support.paths import ROOT
from support.walked_page import not_printed

NOTEBOOK = EXAMPLES / "notebook.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs_and_a_killed_server_changes_no_bit(tmp_path):
    wrote, alone, shapes, launched, same = map(said, code_cells(executed(NOTEBOOK, tmp_path)))
    assert wrote == "Writing train.py\n"
    assert "this process trains alone, and nothing is protected" in alone
    assert shapes == "{'embedding_bags.t.weight': (1000, 16)}"
    assert "! rank 1 died in step 50" in launched and "1 failure survived" in launched
    assert same == "True"
    committed = [said(cell) for cell in code_cells(json.loads(NOTEBOOK.read_text()))]
    for shown, printed in zip(committed, (wrote, alone, shapes, launched, same), strict=True):
        assert not_printed(shown, printed) == [], printed


def test_the_notebook_has_the_script_of_the_readme_and_outputs_of_a_run():
    cells = code_cells(json.loads(NOTEBOOK.read_text()))
    sources = ["".join(cell["source"]) for cell in cells]
    page = (ROOT / "README.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert sources[0] == f"%%writefile train.py\n{script.rstrip()}"
    (command,) = re.findall(r"^    ecrm (launch train.py .*)$", page, re.MULTILINE)
    assert sources[3] == f"!ecrm {command} | cat"
    assert all(cell["outputs"] for cell in cells)
    assert cells[-1]["outputs"][0]["data"]["text/plain"] == ["True"]
