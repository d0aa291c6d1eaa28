"""`motet adapters verify`, and what the SDK checks before it sends a verification or a push."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from motet import Client, InvalidArgument
from motet.cli import exits
from motet.cli.main import main

from tests.client.scripted_server import ScriptedServer

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe\x00", "cannot be read: it is not text"),
        (b"1 2\n1 -5\n", "line 2 of prompts is '1 -5'; write token ids alone, such as 5 17 2"),
        (b"99999999999999999999\n", "line 1 of prompts is '99999999999999999999'; write token ids alone"),
        (b"[1, 2], [3]\n", "line 1 of prompts is '[1, 2], [3]'; write token ids alone"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_refused_in_a_sentence(
    content: bytes | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("prompts").write_bytes(content)
    assert main(["adapters", "verify", "legal", "--prompts", "prompts"]) == exits.REFUSED
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.startswith("motet: --prompts: ")


@pytest.mark.parametrize("prompt", [[5, -1], [1 << 40], ["5"], 7])
def test_prompts_that_are_no_token_ids_are_refused_before_anything_is_sent(server: ScriptedServer, prompt: Any) -> None:
    with Client(server.target) as client, pytest.raises(InvalidArgument, match=r"prompts\[1\]: is not a list of token"):
        client.adapters.verify("legal", prompts=[[1, 2], prompt])
    assert not server.requests


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.empty(2, 2, device="meta"), "is on the device meta, without values; give a dense tensor"),
        (torch.eye(2).to_sparse(), r"is torch.sparse_coo; give a dense tensor with values"),
        (np.zeros((2, 2)), "is float64; give float32, bfloat16 or float16"),
    ],
)
def test_tensors_that_cannot_be_pushed_are_refused_by_name(server: ScriptedServer, tensor: Any, message: str) -> None:
    with Client(server.target) as client, pytest.raises(InvalidArgument, match=message):
        client.adapters.push("legal", {}, {"w": tensor})
    assert not server.requests
