"""`motet generate` with weights under a number."""

from __future__ import annotations

from pathlib import Path

import pytest
from motet.cli import exits

from tests.client.scripted_server import ScriptedServer, playing
from tests.client.test_cli import Capture, motet
from tests.client.test_generation import TEXT, TOKENS


def test_weights_come_with_the_request_and_later_their_number_is_enough(
    server: ScriptedServer, capsys: Capture, tmp_path: Path
) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    server.scripts.extend([playing(TOKENS), playing(TOKENS)])
    assert motet(server, "generate", "--lora-task", "0", "--lora-weights", str(tmp_path), "hi") == exits.OK
    assert motet(server, "generate", "--lora-task", "0", "hi") == exits.OK
    assert capsys.readouterr().out == f"{TEXT}\n{TEXT}\n"
    first, later = server.requests
    assert first.request.HasField("lora_task_id") and sorted(server.files) == [file.name for file in first.files]
    assert later.HasField("lora_task_id") and not later.adapter


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora-weights", "."], "--lora-task: is missing; give the number"),
        (["--lora-task", "1", "--adapter", "a"], "--lora-task: is given beside --adapter or --combination"),
        (["--lora-task", "1", "--combination", "cat"], "--lora-task: is given beside --adapter or --combination"),
        (["--lora-task", "-1"], "lora_task: is -1; give an integer from 0"),
        (["--lora-task", "1", "--lora-weights", "/none"], "/none is not a directory"),
    ],
)
def test_flags_that_do_not_go_together_are_named(
    server: ScriptedServer, capsys: Capture, flags: list[str], words: str
) -> None:
    assert motet(server, "generate", *flags, "hi") == exits.REFUSED
    assert words in capsys.readouterr().err and not server.requests
