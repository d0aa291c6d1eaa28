"""Checks the Python programs of README.md and docs/ with mypy in strict mode, as a user's own checker reads them.

Our settings are left out: a user has none of them. Errors name the document and its line.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def main() -> int:
    """The exit status: 0 if every program passes."""
    with tempfile.TemporaryDirectory() as directory:
        programs = [
            _write(Path(directory), document, text[: match.start(1)].count("\n"), match[1])
            for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
            for text in [document.read_text(encoding="utf-8")]
            for match in _BLOCK.finditer(text)
        ]
        if not programs:
            print("no Python program in README.md or docs/: the pattern is wrong", file=sys.stderr)
            return 1
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", *programs]
        environment = {"MYPYPATH": str(ROOT / "client")}
        done = subprocess.run(command, cwd=directory, env=environment, text=True, capture_output=True)
    if done.returncode not in (0, 1):  # mypy itself failed
        print(done.stdout + done.stderr, file=sys.stderr)
        return done.returncode
    # A user has the SDK among the installed packages, whose own errors mypy does not tell.
    errors = [line for line in done.stdout.splitlines() if line.startswith(tuple(programs))]
    print("\n".join(errors) if errors else f"the programs of the documents pass mypy --strict: {len(programs)}")
    return 1 if errors else 0


def _write(directory: Path, document: Path, num_lines_before: int, program: str) -> str:
    """A file whose line numbers are those of the document."""
    file = directory / f"{document.stem}_line_{num_lines_before + 1}.py"
    file.write_text("\n" * num_lines_before + program, encoding="utf-8")
    return file.name


if __name__ == "__main__":
    sys.exit(main())
