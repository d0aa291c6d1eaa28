"""The benchmark of targets for one GPU runs on a CPU, with a tiny model: every part prints what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.engine.driver import Driver
from benchmarks.engine.random_model import hollow_checkpoint
from benchmarks.engine.step_times import INCOMPLETE
from benchmarks.gpu_targets.__main__ import main
from benchmarks.gpu_targets.engines import PackedVariants, Setup
from benchmarks.serving.checkpoints import LINEARS, SHAPES, llama_config
from contract.fingerprint import checkpoint_fingerprint
from control_plane.registry.model.base_model import BaseModel
from data_plane.errors import AdapterCorrupt

TINY = ["--device", "cpu", "--shape", "tiny", "--rows", "3", "--most-rows", "4", "--context", "20", "--steps", "2"]
SMALL = ["--adapters", "2", "--loads", "3", "--peer-prompt", "6", "--peer-tokens", "4", "--served-tokens", "6"]


@pytest.fixture(autouse=True)
def threads() -> object:
    """Building an engine sets the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """Of the tiny model, whose checkpoint is there."""
    made = Setup(torch.device("cpu"), "tiny", "float32", tmp_path, num_rows=3, context=20, num_steps=2)
    made.make_checkpoint()
    return made


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ("base", ["1 rows of 20 tokens", "3 rows of 20 tokens", "4 rows of "]),
        (
            "loads",
            [
                "no loads ",
                "slowest, of which queueing",
                "3 loads, hashed",
                "3 loads, pinned",
                "a load of 2 at once takes",
            ],
        ),
        ("eager", ["1 rows, 0 adapters", "3 rows, 8 adapters", "3 rows and a prompt of 256, 8 adapters", "submit"]),
        ("served", ["run 2: 3 streams of 20 + 6 tokens", "the device waits"]),
    ],
)
def test_a_part_prints_its_figures(
    part: str, shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *SMALL, "--only", part, "--folder", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    for text in shown:
        assert text in found
    assert not list(tmp_path.iterdir())


def test_peers_compute_the_same_first_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *SMALL, "--only", "peers", "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for text in ("ours, 8 adapters", "continuous batching, its defaults", "PEFT, 8 adapters", "decoding alone"):
        assert text in printed
    found = [line for line in printed.splitlines() if "first tokens" in line]
    assert len(found) == 4  # two settings of continuous batching, a static batch, and PEFT
    assert all("3 of 3 first tokens are equal" in line for line in found)


def test_parts_that_would_begin_after_the_limit_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *SMALL, "--only", "peers,served", "--limit-s", "0"]) == INCOMPLETE
    assert "incomplete: peers, served would have begun after 0 s" in capsys.readouterr().out


def test_a_part_that_fails_leaves_the_others_theirs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr("benchmarks.gpu_targets.peers.measure", fail)
    assert main([*TINY, *SMALL, "--only", "peers,eager"]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no room" in printed
    assert "3 rows, 8 adapters" in printed
    assert printed.endswith("failed: peers\n")


def test_a_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "base,lods"])
    assert "lods: no such part; parts are base, loads, eager, peers, served" in capsys.readouterr().err


def test_a_driver_generates_what_prompts_give_alone(setup: Setup) -> None:
    """Prompts that do not fit into one step are computed beside rows that decode."""
    engine = setup.make_engine(
        num_adapters=0, num_blocks=64, max_rows=4, max_model_len=64, graph_rows=[], token_budget=24
    )
    driver = Driver(engine)
    prompts = [[(7 * row + place) % 300 + 8 for place in range(9)] for row in range(4)]
    together = driver.generate(prompts, 0, 6)
    assert [driver.generate([prompt], 0, 6)[0] for prompt in prompts] == together
    assert [len(completion) for completion in together] == [6] * 4
    assert engine.stats().num_rows == 0


def test_prompts_come_and_go_beside_rows_that_decode(setup: Setup) -> None:
    engine = setup.make_engine(num_adapters=0, num_blocks=64, max_rows=4, max_model_len=64, graph_rows=[])
    driver = Driver(engine)
    driver.begin_decodes(3, 0, num_context=20, num_steps=8)
    for _ in range(2):
        assert sorted(driver.prompt_beside(11, 0).wait().rows.tolist()) == [0, 1, 2, 3]
        assert engine.inspect(3).num_computed == 11
    driver.end_prompt()
    assert [engine.inspect(row).num_computed for row in range(3)] == [24] * 3
    driver.end()
    assert engine.stats().num_rows == 0


def test_variants_of_an_adapter_are_loaded_as_different_ones(setup: Setup) -> None:
    engine = setup.make_engine(num_adapters=3, num_blocks=64, max_rows=4, max_model_len=64, graph_rows=[])
    variants = PackedVariants(setup, 3)
    assert len(set(variants.digests)) == 3
    for slot, digest in enumerate(variants.digests):
        engine.slots.load(slot, 1, digest, variants)
    driver = Driver(engine)
    prompt = list(range(8, 20))
    with_adapters = driver.generate([prompt] * 3, 3, 8)
    assert with_adapters[0] != driver.generate([prompt], 0, 8)[0]


def test_a_changed_chunk_of_a_variant_is_refused(setup: Setup) -> None:
    variants = PackedVariants(setup, 1)
    digest = variants.digests[0]
    chunks = [bytes(chunk) for chunk in variants.open(digest)[1]]
    assert sum(map(len, chunks)) < variants.size_bytes
    variants.chunks = [chunks[0][:-1] + b"\x7f", *chunks[1:]]
    with pytest.raises(AdapterCorrupt, match="hashes to"):
        list(variants.open(digest)[1])


def test_a_hollow_checkpoint_is_read_as_a_whole_one_and_takes_no_room(tmp_path: Path) -> None:
    hollow_checkpoint(tmp_path, llama_config(SHAPES["205m"]), "bfloat16")
    weights = (tmp_path / "model.safetensors").stat()
    assert weights.st_size > 400_000_000
    assert weights.st_blocks * 512 < 1_000_000
    base = BaseModel.load(tmp_path)
    assert base.dtype == "bfloat16"
    assert base.fingerprint == checkpoint_fingerprint(tmp_path)
    assert len(base.linear_shapes) == 16 * len(LINEARS)
