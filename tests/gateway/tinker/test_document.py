"""The program of docs/tinker.md runs as it is printed."""

from __future__ import annotations

import ast
import contextlib
import io
import re

from tests.e2e.harness import ROOT
from tests.gateway.tinker.conftest import Served


def test_the_program_of_the_document_samples_and_scores(served: Served) -> None:
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tinker.md").read_text("utf-8"), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program.replace("http://127.0.0.1:8000", served.gateway.url), "docs/tinker.md", "exec"), {})
    *samples, scores = printed.getvalue().splitlines()
    assert [line.split()[0] in ("length", "stop") for line in samples] == [True] * 4
    assert len(set(samples)) == 4 and len(ast.literal_eval(scores)) == 4
