"""The correctness gate: what is served against merged float32 weights, for every kind, and with a planted mistake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from motet import AdapterVersion, FailedPrecondition, InvalidArgument, NotFound, VersionRollout, VersionVerification
from motet.cli.main import main
from safetensors.numpy import load_file, save_file

from tests.data_plane.engine.test_long_context import with_fields
from tests.e2e.harness import System, active_version
from tests.makers import make_adapter, make_checkpoint

# PEFT takes the biases of LoRA for shards of matrices, and says so.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*have invalid shape", "ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:.*embedding layer has been resized"),
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
    "own-rows": {"targets": ATTENTION, "resize": 259, "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"targets": ATTENTION, "trainable_token_indices": [5, 77]},
    "activated": {"targets": ATTENTION, "alora_invocation_tokens": [201, 17]},
}


@dataclass(frozen=True)
class Place:
    """A running system with a worker of some kind."""

    system: System
    checkpoint: Path
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
    fields = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    made["long"] = with_fields(directory / "long", made["lora"], **fields)
    return checkpoint, made


def place(files: tuple[Path, dict[str, Path]], directory: Path, module: str, dtype: str) -> Iterator[Place]:
    checkpoint, adapters = files
    with System(checkpoint, directory, control_flags=["--dtype", dtype]) as system:
        system.start_worker(flags=[*FLAGS, "--dtype", dtype], command=("-m", module))
        yield Place(system, checkpoint, adapters)


@pytest.fixture(scope="module")
def right(files: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from place(files, tmp_path_factory.mktemp("right"), "data_plane", "float32")


@pytest.fixture(scope="module")
def wrong(files: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from place(files, tmp_path_factory.mktemp("wrong"), "tests.fakes.doubling_worker", "float32")


@pytest.mark.parametrize("kind", [*KINDS, "long"])
def test_a_version_that_is_served_as_its_weights_say_passes(right: Place, kind: str) -> None:
    right.system.client().adapters.register(kind, right.adapters[kind])
    found = right.verify(kind)
    assert found.passed and found.largest_error <= found.tolerance <= 0.02
    assert found.largest_effect > 5 * found.tolerance, "these prompts would show a wrong adapter"
    assert (found.num_prompts, found.num_logprobs) == (4, 4 * (23 + 2 * (kind == "activated")))


@pytest.mark.parametrize("kind", [*KINDS, "long"])
def test_a_worker_that_doubles_the_scaling_fails(wrong: Place, kind: str) -> None:
    wrong.system.client().adapters.register(kind, wrong.adapters[kind])
    found = wrong.verify(kind)
    assert not found.passed and found.largest_error > 5 * found.tolerance


def test_a_version_whose_logits_are_not_finite_fails_with_a_verdict(right: Place, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "huge", right.checkpoint, rank=4, targets=ATTENTION)
    tensors = load_file(directory / "adapter_model.safetensors")
    save_file(
        {name: np.full_like(tensor, 3e38) for name, tensor in tensors.items()}, directory / "adapter_model.safetensors"
    )
    right.system.client().adapters.register("huge", directory, rollout=VersionRollout(hold=True))
    (version,) = right.system.client().adapters.versions("huge")
    verified = right.system.client().adapters.verify("huge", version.digest, activate=True, timeout_s=300.0)
    assert verified.verification is not None and not verified.verification.passed
    assert verified.verification.largest_error == 1e30
    assert right.system.client().adapters.get("huge").active_version is None


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


def test_a_first_version_is_not_served_before_its_verdict(
    right: Place, wrong: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    for served, status in ((right, 0), (wrong, 1)):
        client, server = served.system.client(), ["--server", served.system.address]
        directory = str(served.adapters["dora"])
        assert main(["adapters", "add", "first", directory, "--verify", "--version-label", "best", *server]) == status
        assert ("; active" in capsys.readouterr().out) is (status == 0)
        (version,) = client.adapters.versions("first")
        assert version.verification is not None and version.verification.passed is (status == 0)
        if status == 0:
            assert client.generate([5, 6], adapter="first@best", max_tokens=2).result().completions
            continue
        for name in ("first", "first@best"):
            with pytest.raises((FailedPrecondition, NotFound)):
                client.generate([5, 6], adapter=name, max_tokens=2).result()
        with pytest.raises(FailedPrecondition, match="no version is active"):
            client.adapters.pin("first")
        served.system.control_plane.kill()
        served.system.start_control_plane()
        with pytest.raises(FailedPrecondition, match="no version is active"):
            client.generate([5, 6], adapter="first", max_tokens=2).result()
        assert (
            main(["adapters", "activate", "first", version.digest[:12], *server]) == 0
        )  # the operator wants it all the same
        assert client.generate([5, 6], adapter="first", max_tokens=2).result().completions


def test_a_pushed_version_that_is_held_becomes_active_by_its_verdict(right: Place, wrong: Place) -> None:
    for served, is_right in ((right, True), (wrong, False)):
        client = served.system.client()
        files = served.adapters["lora"]
        config = (files / "adapter_config.json").read_text()
        weights = (files / "adapter_model.safetensors").read_bytes()
        pushed = client.adapters.push("pushed", config, weights, hold=True).adapter
        assert pushed.active_version is None and pushed.registration is not None
        with pytest.raises(FailedPrecondition, match="no version is active"):
            client.generate([5, 6], adapter="pushed", max_tokens=2).result()
        registered = pushed.registration.version
        assert registered is not None
        version = client.adapters.verify("pushed", registered.digest, activate=True)
        assert version.verification is not None and version.verification.passed is is_right
        assert (client.adapters.get("pushed").active_version is not None) is is_right


def test_a_canary_that_is_verified_first_gets_its_share_afterwards(right: Place) -> None:
    client, server = right.system.client(), ["--server", right.system.address]
    first = active_version(client.adapters.register("shared", right.adapters["lora"]))
    options = ["--verify", "--canary", "25", *server]
    assert main(["adapters", "add", "shared", str(right.adapters["rslora"]), *options]) == 0
    adapter = client.adapters.get("shared")
    assert active_version(adapter).digest == first.digest
    assert adapter.canary is not None and adapter.canary.per_mille == 250 and adapter.canary.digest != first.digest
    with pytest.raises(InvalidArgument, match=r"header\.rollout\.hold"):
        rollout = VersionRollout(hold=True, canary_per_mille=5)
        client.adapters.register("shared", right.adapters["dora"], rollout=rollout)


def test_prompts_of_the_caller_may_have_the_versions_own_tokens(right: Place) -> None:
    client = right.system.client()
    for name in ("own-rows", "activated"):
        client.adapters.register(name, right.adapters[name])
    assert client.adapters.verify("own-rows", prompts=[[5, 258, 256, 7]]).verification is not None
    with pytest.raises(InvalidArgument, match="has 259; token ids are below 259"):
        client.adapters.verify("own-rows", prompts=[[5, 259]])
    with pytest.raises(InvalidArgument, match="lacks the adapter's 2 invocation tokens"):
        client.adapters.verify("activated", prompts=[[5, 17, 201]])
