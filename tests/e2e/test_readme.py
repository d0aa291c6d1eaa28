"""The README's program runs as it is printed, and the CLI tour's commands work against the same server."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from motet.cli.main import main

from tests.e2e.harness import ROOT, System
from tests.makers import make_adapter, make_checkpoint, make_tokenizer


def program_with(text: str) -> str:
    """README's one Python program that has this text."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    [program] = [block for block in blocks if text in block]
    return str(program)


def test_the_program_without_a_server_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = make_tokenizer(make_checkpoint(tmp_path / "base", arch="llama"))
    adapter = make_adapter(tmp_path / "adapter", checkpoint, rank=4, alpha=8, targets=["q_proj"], seed=1)
    program = program_with("import LLM").replace("path/to/checkpoint", str(checkpoint))
    exec(compile(program.replace("path/to/peft-adapter", str(adapter)), "README.md", "exec"), {})
    assert re.match(r"legal Hello .*None Bye ", capsys.readouterr().out, re.DOTALL)


def test_sdk_program_and_cli_tour_of_the_readme_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = make_tokenizer(make_checkpoint(tmp_path / "base", arch="llama"))
    adapter = make_adapter(tmp_path / "adapter", checkpoint, rank=4, alpha=8, targets=["q_proj"], seed=1)
    given = program_with("import Client")
    with System(checkpoint, tmp_path) as system:
        system.start_hash_worker()
        program = given.replace("127.0.0.1:50051", system.address).replace("path/to/peft-adapter", str(adapter))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "README.md", "exec"), {})
        assert "tokens" in printed.getvalue() and "legal" in printed.getvalue()

        def cli(*argv: str) -> str:
            assert main(["--server", system.address, *argv]) == 0, capsys.readouterr().err
            return capsys.readouterr().out

        cli("adapters", "add", "second", str(adapter))
        assert {"legal", "second"} <= set(re.findall(r"[\w-]+", cli("adapters", "list")))
        assert "rank 4" in cli("adapters", "get", "legal")
        cli("adapters", "pin", "legal")
        cli("adapters", "unpin", "legal")
        events = [
            json.loads(line)
            for line in cli("generate", "--adapter", "legal", "--max-tokens", "5", "--json", "The party").splitlines()
        ]
        assert len(events) >= 2
        tour = re.findall(r"^motet (generate .*?)(?: +#.*)?$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
        assert len(tour) == 6
        for command in tour:
            assert cli(*shlex.split(command), "--max-tokens", "6")
        assert {"w0", "ipv4:127.0.0.1"} <= set(cli("status").split())
        cli("adapters", "remove", "second")
        assert "second" not in cli("adapters", "list")
