"""The program of docs/openai.md runs as it is printed, and its table has every field."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from gateway.openai.messages import ChatBody, CompletionBody
from tests.e2e.harness import ROOT
from tests.gateway.openai.conftest import Served

DOCUMENT = (ROOT / "docs" / "openai.md").read_text("utf-8")


PROGRAMS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_of_the_document_prints_a_text(served: Served, program: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program.replace("http://127.0.0.1:8000", served.gateway.url), "docs/openai.md", "exec"), {})
    assert len(printed.getvalue()) > 1, "more than the end of the line"


def test_every_field_of_a_body_is_in_the_document() -> None:
    section = DOCUMENT.partition("## Fields")[2].partition("### Differences")[0]
    known = set(CompletionBody.__struct_fields__) | set(ChatBody.__struct_fields__)
    missing = known - set(re.findall(r"`([a-z_]+)", section)) - {"model", "truncate_prompt_tokens"}
    assert not missing
