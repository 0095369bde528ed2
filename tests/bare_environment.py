"""What a stranger gets: run by the Python of an environment with the wheel of ECRM and no more.

`make check-wheel` makes the environment. README's script and commands are tried as README has them:
the second command of the installation is named by an error and then typed, the script trains alone
and under `ecrm launch` with a server killed, and both models have the same bits.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def commands(page: str) -> list[str]:
    """The indented commands of a page, in their order."""
    return re.findall(r"^    (\w[^#\n]*?) *(?:#.*)?$", page, re.MULTILINE)


def only(found: list[str]) -> str:
    (one,) = found
    return one


def typed(command: str, folder: Path, code: int = 0) -> str:
    """The output of a command typed in the activated environment. Raises for another exit code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        shlex.split(command),
        cwd=folder,
        env={
            **kept,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(ROOT / "requirements.lock"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def digest(model: Path) -> str:
    """SHA-256 of a saved model, which is removed."""
    found = hashlib.sha256(model.read_bytes()).hexdigest()
    model.unlink()
    return found


def main() -> None:
    page = (ROOT / "README.md").read_text()
    script = only(
        re.findall(r"^```python\n(import torch\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    )
    launch = only([one for one in commands(page) if one.startswith("ecrm launch train.py")])
    second = only([one for one in commands(page) if one.startswith("pip install --no-deps")])
    packages = {dist.metadata["Name"].lower() for dist in metadata.distributions()}
    assert "ecrm" in packages and "torchrec" not in packages and "pytest" not in packages, packages
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "train.py").write_text(script)
        where = typed("python -c 'import ecrm; print(ecrm.__file__)'", folder)
        assert where.startswith(str(BIN.parent)), where
        said = typed(launch, folder, code=2)
        assert said == f"ecrm: error: TorchRec is not installed: type {second}\n", said
        typed(second, folder)
        typed("python train.py", folder)
        alone = digest(folder / "model.pt")
        said = typed(launch, folder)
        assert re.search(r"^! rank 1 died in step", said, re.MULTILINE), said
        assert digest(folder / "model.pt") == alone
    print("wheel in a bare environment: README's script, alone and with a server killed, same bits")
    print("1 passed, 0 failed")


if __name__ == "__main__":
    main()
