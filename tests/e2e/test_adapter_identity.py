"""Each request gets exactly the tokens that its adapter alone would produce, however adapters come and go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from motet import Client

from tests.e2e.harness import System, active_version
from tests.e2e.traffic import Job, ask, ask_all, prompts
from tests.makers import make_adapter, make_checkpoint
from tests.oracle import Oracle

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_TOKENS = 12
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "512", "--token-budget", "64"]
WORKER_FLAGS += ["--max-model-len", "256"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), arch="llama")


@pytest.fixture(scope="module")
def client(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of a running system with one worker."""
    with System(checkpoint, tmp_path_factory.mktemp("system")) as system:
        system.start_worker(flags=WORKER_FLAGS)
        yield system.client()


def test_zero_b_generates_as_the_base_and_two_names_of_the_same_bytes_generate_alike(
    client: Client, checkpoint: Path, tmp_path: Path
) -> None:
    zero = make_adapter(tmp_path / "zero", checkpoint, rank=8, alpha=16, targets=TARGETS, seed=1, scale_b=0.0)
    loud = make_adapter(tmp_path / "loud", checkpoint, rank=8, alpha=16, targets=TARGETS, seed=2)
    client.adapters.register("zero", zero)
    first, second = client.adapters.register("loud-1", loud), client.adapters.register("loud-2", loud)
    assert active_version(first).digest == active_version(second).digest
    texts = prompts([3, 17, 40], vocab_size=256, seed=3)
    jobs = [Job(text, name, NUM_TOKENS) for text in texts for name in ["", "zero", "loud-1", "loud-2"]]
    tokens = {
        (completion.job.prompt, completion.job.adapter): completion.token_ids for completion in ask_all(client, jobs)
    }
    for text in texts:
        assert tokens[text, "zero"] == tokens[text, ""]
        assert tokens[text, "loud-1"] == tokens[text, "loud-2"]
        assert tokens[text, "loud-1"] != tokens[text, ""]


def test_same_name_update_under_load_gives_each_stream_wholly_old_or_wholly_new(
    client: Client, checkpoint: Path, tmp_path: Path
) -> None:
    versions = [
        make_adapter(tmp_path / f"v{i}", checkpoint, rank=4, alpha=8, targets=TARGETS, seed=200 + i) for i in range(2)
    ]
    digests = [active_version(client.adapters.register("changing", directory)).digest for directory in versions]
    assert digests[0] != digests[1]
    oracle = Oracle(checkpoint, dict(zip(digests, versions, strict=True)))
    # One prompt for all: a prefix cache that forgot the version would mix them up.
    for prompt in prompts([33] * 20, vocab_size=256, seed=11):
        expected = {digest: oracle.greedy(prompt, NUM_TOKENS, digest) for digest in digests}
        if all(completion.is_decisive for completion in expected.values()):
            break
    else:
        raise AssertionError("no prompt has completions that rounding cannot turn")
    is_done = threading.Event()

    def flip() -> None:
        turn = 0
        while not is_done.is_set():
            client.adapters.activate("changing", digests[turn % 2])
            turn += 1
            is_done.wait(0.02)

    flipper = threading.Thread(target=flip)
    flipper.start()
    try:
        completions = ask_all(client, [Job(prompt, "changing", NUM_TOKENS)] * 60, num_threads=6)
    finally:
        is_done.set()
        flipper.join()
    for completion in completions:
        assert completion.token_ids == expected[completion.digest].token_ids
    assert {completion.digest for completion in completions} == set(digests)


def test_deleted_adapter_is_gone_from_every_tier_and_its_name_can_be_used_anew(
    client: Client, checkpoint: Path, tmp_path: Path
) -> None:
    old = make_adapter(tmp_path / "old", checkpoint, rank=4, alpha=8, targets=TARGETS, seed=300)
    new = make_adapter(tmp_path / "new", checkpoint, rank=4, alpha=8, targets=TARGETS, seed=301)
    prompt = prompts([21], vocab_size=256, seed=13)[0]
    before = client.status()
    client.adapters.register("phoenix", old)
    first = ask(client, Job(prompt, "phoenix", NUM_TOKENS))
    assert client.status().workers[0].num_adapters_loaded == before.workers[0].num_adapters_loaded + 1
    client.adapters.delete("phoenix")
    after = client.status()
    assert after.adapters.num_registered == before.adapters.num_registered
    assert after.adapters.num_stored == before.adapters.num_stored
    assert after.workers[0].num_adapters_loaded == before.workers[0].num_adapters_loaded
    assert after.workers[0].arena_used_bytes == before.workers[0].arena_used_bytes
    client.adapters.register("phoenix", new)
    second = ask(client, Job(prompt, "phoenix", NUM_TOKENS))
    oracle = Oracle(checkpoint, {"old": old, "new": new})
    for completion, name in [(first, "old"), (second, "new")]:
        expected = oracle.greedy(prompt, NUM_TOKENS, name)
        assert completion.token_ids == expected.token_ids or not expected.is_decisive
    assert first.token_ids != second.token_ids
