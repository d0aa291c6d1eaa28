"""What is given with --model and is not a checkpoint directory gets its own sentence with the next step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contract.model_dir import why_no_checkpoint


def test_directory_with_a_configuration_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert why_no_checkpoint(tmp_path) is None


def file_in(directory: Path, name: str, content: str = "") -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def reason_of(path: Path) -> str:
    reason = why_no_checkpoint(path)
    assert reason is not None
    return reason


def test_missing_directory(tmp_path: Path) -> None:
    reason = reason_of(tmp_path / "none")
    assert reason.startswith(f"there is no directory {tmp_path / 'none'}; give a checkpoint directory")
    assert "Hub" not in reason


def test_id_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reason = reason_of(Path("meta-llama/Llama-3.1-8B"))
    assert "Motet downloads nothing, run `hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B`" in reason
    assert reason.endswith("give --model Llama-3.1-8B")


def test_gguf_file_and_folder(tmp_path: Path) -> None:
    file = file_in(tmp_path, "model.Q4.gguf")
    assert reason_of(file).startswith(f"{file} is a GGUF file, which is not served")
    assert reason_of(tmp_path).startswith(f"{tmp_path} holds GGUF files, which are not served")


def test_file_of_a_checkpoint_and_any_other_file(tmp_path: Path) -> None:
    weights = file_in(tmp_path, "a/model.safetensors")
    assert reason_of(weights).startswith(f"{weights} is a file; give a checkpoint directory")
    file_in(tmp_path, "a/config.json", "{}")
    assert reason_of(weights) == f"{weights} is a file; give its directory, --model {tmp_path / 'a'}"


@pytest.mark.parametrize(
    ("config", "name"),
    [('{"base_model_name_or_path": "org/base"}', ", org/base,"), ("{}", ""), ("[]", ""), ("{", "")],
)
def test_adapter_directory(tmp_path: Path, config: str, name: str) -> None:
    file_in(tmp_path, "adapter_config.json", config)
    assert reason_of(tmp_path) == (
        f"{tmp_path} is an adapter; give its base model{name} with --model, and when the server runs: "
        f"motet adapters add NAME {tmp_path}"
    )


def test_directory_above_the_checkpoint_names_it(tmp_path: Path) -> None:
    file_in(tmp_path, "checkpoint-500/config.json", "{}")
    file_in(tmp_path, "snapshots/0a1b/config.json", "{}")
    assert reason_of(tmp_path) == (
        f"{tmp_path} holds no config.json; there is one in {tmp_path}/checkpoint-500, {tmp_path}/snapshots/0a1b: "
        "give that directory"
    )


def test_directory_without_a_configuration_names_what_it_holds(tmp_path: Path) -> None:
    assert "holds no config.json (it holds nothing); give" in reason_of(tmp_path)
    for index in range(7):
        file_in(tmp_path, f"part{index}.pth", json.dumps(index))
    assert "(it holds part0.pth, part1.pth, part2.pth, part3.pth, part4.pth and 2 more); give" in reason_of(tmp_path)


def test_path_that_cannot_be_read() -> None:
    assert "cannot be read: File name too long; give a checkpoint directory" in reason_of(Path("x" * 5000))
