"""The scripts of docs/how-to under `ecrm launch`, with a server killed: the lines of the page."""

import pytest

from support.commands import ecrm
from support.how_to import PAGES, missing, printed_on, script_of

LAYOUT = ("--servers", "3", "--trainers", "1", "--spares", "0", "-k", "2", "-m", "1")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_script_prints_the_lines_of_its_page_although_a_server_dies(tmp_path, page):
    words = ("launch", str(script_of(page)), *LAYOUT, "--kill", "1@7:parity")
    done = ecrm(*words, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "! rank 1 died in step 7 (parity)" in done.stdout
    assert missing(printed_on(page), done.stdout) == [], done.stdout
