"""Every program of examples/ runs as its first lines say, against a whole system with a fake model."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.examples.conftest import EXAMPLES, Examples


def test_generate_streams_what_the_sdk_returns(examples: Examples) -> None:
    expected = examples.system.client().generate("The party", adapter="legal", max_tokens=64).text()
    assert examples.run("generate.py", "legal", "The party") == expected + "\n"


def test_async_generate_completes_base_and_adapters(examples: Examples) -> None:
    lines = examples.run("async_generate.py", "Once", "legal", "medical").splitlines()
    assert [line.split(":")[0] for line in lines] == ["base model", "legal", "medical"]
    assert len({line.split(": ", 1)[1] for line in lines}) == 3


def test_chat_remembers_the_turns_before(examples: Examples) -> None:
    printed = examples.run("chat.py", "legal", text="Good morning, and how do you do?\nWhat did I say?\n\n")
    counts = re.findall(r"\[(\d+) of (\d+) prompt tokens were cached\]", printed)
    assert len(counts) == 2
    (first_cached, first_prompt), (second_cached, second_prompt) = [(int(a), int(b)) for a, b in counts]
    assert first_cached == 0 and second_prompt > first_prompt and second_cached > 0


def test_completions_and_beams_prints_every_kind(examples: Examples) -> None:
    printed = examples.run("completions_and_beams.py", "Once upon a time")
    assert sorted(re.findall(r"sample (\d) ended", printed)) == ["0", "1", "2"]
    assert len(re.findall(r"^  '|^  \"", printed, re.M)) == 2
    assert len(re.findall(r"^  -?\d+\.\d{3} ", printed, re.M)) == 2
    assert printed.count("rank 1;") == 4


def test_embed_prints_the_texts_by_nearness(examples: Examples) -> None:
    lines = examples.run("embed.py", "legal", "Who pays?", "Who pays?", "The seller delivers.").splitlines()
    assert lines[0] == "1.000  Who pays?" and len(lines) == 2 and lines[1].endswith("  The seller delivers.")


def test_tenants_shows_what_each_used(examples: Examples) -> None:
    printed = examples.run("tenants.py", "Once upon a time")
    assert printed.count("batch: done") == 3 and "interactive: done" in printed
    assert "interactive: weight 4, 16 tokens generated" in printed
    assert "batch: weight 1, 48 tokens generated" in printed


def test_upload_from_ci_registers_a_version_and_reports_a_refusal(examples: Examples, tmp_path: Path) -> None:
    printed = examples.run(
        "upload_from_ci.py", "from-ci", str(examples.adapter_dirs["legal"]), "The party", "--label", "commit=abc123"
    )
    assert printed.startswith("created: version 1, ") and "sample: " in printed
    assert examples.system.client().adapters.get("from-ci").labels == {"commit": "abc123"}
    printed = examples.run("upload_from_ci.py", "from-ci", str(examples.adapter_dirs["medical"]), "The party")
    assert printed.startswith("version_added: version 2, ")
    broken = tmp_path / "broken"
    broken.mkdir()
    config = (examples.adapter_dirs["legal"] / "adapter_config.json").read_text("utf-8")
    (broken / "adapter_config.json").write_text(config.replace('"LORA"', '"IA3"'), "utf-8")
    weights = (examples.adapter_dirs["legal"] / "adapter_model.safetensors").read_bytes()
    (broken / "adapter_model.safetensors").write_bytes(weights)
    printed = examples.run("upload_from_ci.py", "from-ci", str(broken), "The party", exit_status=1)
    assert "peft_type" in printed
    version = examples.system.client().adapters.get("from-ci").active_version
    assert version is not None and version.number == 2


def test_training_loop_serves_every_round(examples: Examples, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("The party of the first part. " * 40, "utf-8")
    printed = examples.run(
        "training_loop.py", str(examples.checkpoint), "trained", str(corpus), "--rounds", "2", "--steps", "2"
    )
    rounds = re.findall(r"round (\d): loss [\d.]+, version (\d) (\w{12}), ", printed)
    assert [(number, version) for number, version, _ in rounds] == [("1", "1"), ("2", "2")]
    newest_first = [version.digest[:12] for version in examples.system.client().adapters.versions("trained")]
    assert [digest for _, _, digest in rounds] == newest_first[::-1]


def test_push_every_step_samples_from_each_version(examples: Examples) -> None:
    printed = examples.run("push_every_step.py", str(examples.checkpoint), "policy", "The party", "--steps", "3")
    steps = re.findall(r"step (\d): reward [\d.]+, version (\d) (\w{12}), visible after \d+ ms", printed)
    assert [(number, version) for number, version, _ in steps] == [("1", "2"), ("2", "3"), ("3", "4")]
    newest_first = [version.digest[:12] for version in examples.system.client().adapters.versions("policy")]
    assert [digest for _, _, digest in steps] == newest_first[-2::-1]


def test_every_example_is_in_the_table_and_run_by_a_test() -> None:
    """Its first lines say what it shows and how to run it."""
    table = (EXAMPLES / "README.md").read_text("utf-8")
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    programs = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("node/*.js")]
    assert len(programs) >= 8
    for program in programs:
        name = str(program.relative_to(EXAMPLES))
        assert f"]({name})" in table and f'"{name}"' in tests
        text = program.read_text("utf-8")
        head = ast.get_docstring(ast.parse(text)) if program.suffix == ".py" else "\n".join(text.splitlines()[:3])
        assert head and f"examples/{name}" in head
