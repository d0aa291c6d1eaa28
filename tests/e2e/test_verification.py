"""The correctness gate: what is served against merged float32 weights, for every kind, and with a planted mistake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from motet import AdapterVersion, InvalidArgument, NotFound, VersionVerification
from motet.cli.main import main

from tests.e2e.harness import System, active_version
from tests.makers import make_adapter, make_checkpoint

# PEFT takes the biases of LoRA for shards of matrices, and says so.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*have invalid shape", "ignore:Setting `save_embedding_layers`"),
]
FLAGS = ["--block-size", "4", "--num-blocks", "256", "--max-rows", "16", "--max-model-len", "64"]
FLAGS += ["--num-slots", "8", "--arena-bytes", "64MiB", "--device", "cpu", "--threads", "1"]
ATTENTION = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "lora": {"targets": ATTENTION},
    "rslora": {"targets": ATTENTION, "rslora": True},
    "dora": {"targets": ATTENTION, "use_dora": True},
    "lora-bias": {"targets": ["q_proj", "v_proj"], "lora_bias": True},
    "head": {"targets": ["lm_head", "embed_tokens"]},
}


@dataclass(frozen=True)
class Place:
    """A running system with a worker of some kind."""

    system: System
    adapters: dict[str, Path]

    def verify(self, name: str) -> VersionVerification:
        version = self.system.client().adapters.verify(name, timeout_s=300.0)
        assert version.verification is not None
        return version.verification


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    directory = tmp_path_factory.mktemp("verification")
    checkpoint = make_checkpoint(directory / "model", arch="qwen2")
    made = {
        name: make_adapter(directory / name, checkpoint, rank=4, seed=seed, **options)  # type: ignore[arg-type]
        for seed, (name, options) in enumerate(KINDS.items())
    }
    return checkpoint, made


def place(files: tuple[Path, dict[str, Path]], directory: Path, module: str, dtype: str) -> Iterator[Place]:
    checkpoint, adapters = files
    with System(checkpoint, directory, control_flags=["--dtype", dtype]) as system:
        system.start_worker(flags=[*FLAGS, "--dtype", dtype], command=("-m", module))
        yield Place(system, adapters)


@pytest.fixture(scope="module")
def right(files: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from place(files, tmp_path_factory.mktemp("right"), "data_plane", "float32")


@pytest.fixture(scope="module")
def wrong(files: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from place(files, tmp_path_factory.mktemp("wrong"), "tests.fakes.doubling_worker", "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_that_is_served_as_its_weights_say_passes(right: Place, kind: str) -> None:
    right.system.client().adapters.register(kind, right.adapters[kind])
    found = right.verify(kind)
    assert found.passed and found.largest_error <= found.tolerance <= 0.02
    assert found.largest_effect > 5 * found.tolerance, "these prompts would show a wrong adapter"
    assert (found.num_prompts, found.num_logprobs) == (4, 4 * 23)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_doubles_the_scaling_fails(wrong: Place, kind: str) -> None:
    wrong.system.client().adapters.register(kind, wrong.adapters[kind])
    found = wrong.verify(kind)
    assert not found.passed and found.largest_error > 5 * found.tolerance


def test_bfloat16_has_the_tolerance_of_its_rounding(files: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    for served in place(files, tmp_path, "data_plane", "bfloat16"):
        served.system.client().adapters.register("lora", served.adapters["lora"])
        found = served.verify("lora")
        assert found.passed and 0.01 < found.tolerance <= 1.0 and found.largest_effect > found.tolerance


def test_the_verdict_is_stored_with_the_version_and_survives_a_restart(right: Place) -> None:
    client = right.system.client()
    first = active_version(client.adapters.register("kept", right.adapters["lora"]))
    assert first.verification is None
    verified = client.adapters.verify("kept", prompts=[[5, 6, 7], [8, 9]])
    assert verified.digest == first.digest and verified.verification is not None
    assert (verified.verification.num_prompts, verified.verification.num_logprobs) == (6, 4 * 23 + 3)
    right.system.control_plane.kill()
    right.system.start_control_plane()
    (again,) = client.adapters.versions("kept")
    assert isinstance(again, AdapterVersion) and again.verification == verified.verification
    assert active_version(client.adapters.get("kept")).verification == verified.verification
    with pytest.raises(NotFound):
        client.adapters.verify("nobody")
    with pytest.raises(InvalidArgument, match=r"prompts\[0\]\.ids"):
        client.adapters.verify("kept", prompts=[[1]])


def test_the_command_line_activates_only_what_passes(
    right: Place, wrong: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    for served, status, says in ((right, 0, "passed: gated"), (wrong, 1, "FAILED: gated")):
        client = served.system.client()
        first = active_version(client.adapters.register("gated", served.adapters["lora"]))
        server = ["--server", served.system.address]
        assert main(["adapters", "add", "gated", str(served.adapters["rslora"]), "--verify", *server]) == status
        printed = capsys.readouterr().out
        assert says in printed and ("; active" in printed) is (status == 0)
        now = active_version(client.adapters.get("gated"))
        assert (now.digest == first.digest) is (status == 1)
        assert main(["adapters", "verify", "gated", *server]) == status
        assert "largest error" in capsys.readouterr().out
        main(["adapters", "versions", "gated", *server])
        assert ("FAILED" in capsys.readouterr().out) is (status == 1)
