"""Commands that a document shows, for tests that execute them.

A block that a test executes has a name behind its language: ```sh setup-tls. Its commands run as they are printed, in a
directory of the test.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from motet.cli import server_parts

ROOT = Path(__file__).resolve().parents[1]
COMMAND_S = 60.0


def block(document: str, name: str, *, language: str = "sh") -> str:
    """The named block of a document of the repository."""
    found = re.findall(
        rf"^```{language} {name}\n(.*?)^```$", (ROOT / document).read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert len(found) == 1, f"{document} has {len(found)} blocks {name}"
    return str(found[0])


def commands(text: str) -> list[list[str]]:
    """The words of each command of a block, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(text: str, directory: Path) -> None:
    """Execute a block with a shell that stops at the first command that fails. `motet` is that of the checkout.

    `model_signing` is the package's where it is installed, else one of the tests that takes the same arguments.
    """
    modules = {"python": "", "motet": "-m motet"}
    if shutil.which("model_signing") is None:
        modules["model_signing"] = "-m tests.fakes.model_signing"
    python = shlex.quote(sys.executable)
    functions = "".join(f'{name}() {{ {python} {arguments} "$@"; }}\n' for name, arguments in modules.items())
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", functions + text],
        cwd=directory,
        env=server_parts.child_environment(),
        timeout=COMMAND_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
