"""Constrained rows that sit out steps, from the SDK to a worker and back: stop strings, min_tokens, seeds and best_of
hold."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from motet import Client, Completion, FinishReason, Generation, Regex
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import System
from tests.e2e.test_metrics import free_address
from tests.makers import make_checkpoint, make_tokenizer

LATE_WORKER = ("-m", "tests.fakes.late_worker", "--device", "cpu", "--threads", "1")
FLAGS = ["--dtype", "float32", "--num-blocks", "200", "--arena-bytes", "64MiB", "--max-model-len", "128"]
FORM = Regex("([a-f]{4}-){2,12}")
END = 0  # the token that ends a completion
SHORT = Regex("[ab]{3,58}")  # may end after any token


@dataclass(frozen=True)
class Served:
    """What both workers returned for each request, and how many rows sat out a step of the second one."""

    in_time: dict[str, Generation]
    late: dict[str, Generation]
    num_waits: float


def requests_of(whole: Generation) -> dict[str, dict[str, Any]]:
    """By name. Stop strings are taken from a completion without one; the plain request shares steps with the others."""
    text = whole.completions[0].text
    found: dict[str, dict[str, Any]] = {f"seed {seed}": {"seed": seed} for seed in (1, 2)}
    found |= {f"stop {at}": {"seed": 1, "stop": text[at : at + 3]} for at in (2, 4, 6)}
    early: dict[str, Any] = {"seed": 1, "constraint": SHORT, "logit_bias": {END: 20.0}}
    found |= {f"least {least}": {**early, "min_tokens": least} for least in (0, 40, 50)}
    found |= {"samples": {"seed": 4, "n": 3, "stop": "a-"}}
    found |= {"best": {"seed": 6, "n": 2, "best_of": 4}, "all of best": {"seed": 6, "n": 4, "logprobs": 0}}
    return found | {"plain": {"seed": 5, "constraint": None}}


def generate(client: Client, options: dict[str, Any]) -> Generation:
    defaults = {"max_tokens": 60, "temperature": 1.0, "constraint": FORM, "timeout_s": 120.0}
    return client.generate("Go:", **{**defaults, **options}).result()


def generate_all(client: Client, requests: dict[str, dict[str, Any]]) -> dict[str, Generation]:
    with ThreadPoolExecutor(len(requests)) as threads:
        done = threads.map(lambda options: generate(client, options), requests.values())
        return dict(zip(requests, done, strict=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory: Path = tmp_path_factory.mktemp("system")
    checkpoint = make_tokenizer(make_checkpoint(directory / "model", arch="llama"))
    address = free_address()
    with System(checkpoint, directory) as system:
        client = system.client()
        worker = system.start_worker("quick", FLAGS)
        requests = requests_of(generate(client, {"seed": 1}))
        in_time = generate_all(client, requests)
        worker.stop()
        system.start_worker("late", [*FLAGS, "--worker-metrics-listen", address], command=LATE_WORKER)
        late = generate_all(client, requests)
        yield Served(in_time, late, waits_at(address))


def waits_at(address: str) -> float:
    """Rows that sat out a step of the worker."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return next(sample.value for sample in samples if sample.name == "motet_step_waiting_rows_total")


def test_every_completion_is_that_of_a_worker_whose_masks_are_in_time(served: Served) -> None:
    assert served.num_waits > 0
    for name, expected in served.in_time.items():
        for one, other in zip(served.late[name].completions, expected.completions, strict=True):
            assert (one.token_ids, one.text) == (other.token_ids, other.text), name
            assert one.finished.finish_reason is other.finished.finish_reason, name
            assert one.finished.usage.completion_tokens == other.finished.usage.completion_tokens, name


def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
    whole = served.late["seed 1"].completions[0].text
    for at in (2, 4, 6):
        completion = served.late[f"stop {at}"].completions[0]
        assert completion.text == whole.partition(whole[at : at + 3])[0]
        assert completion.finished.finish_reason is FinishReason.STOP_STRING


def test_best_of_returns_the_likeliest_samples(served: Served) -> None:
    samples = served.late["all of best"].completions
    best = served.late["best"].completions
    assert len({sample.text for sample in samples}) == 4
    in_order = sorted(samples, key=mean_logprob, reverse=True)
    assert [each.text for each in best] == [each.text for each in in_order[:2]]


def mean_logprob(completion: Completion) -> float:
    assert completion.finished.cumulative_logprob is not None
    return completion.finished.cumulative_logprob / len(completion.token_ids)


def test_min_tokens_and_seeds_hold(served: Served) -> None:
    assert len(served.late["least 0"].completions[0].token_ids) < 40, "min_tokens changes nothing"
    for least in (40, 50):
        assert len(served.late[f"least {least}"].completions[0].token_ids) >= least
    assert served.late["seed 1"].completions[0].text != served.late["seed 2"].completions[0].text
