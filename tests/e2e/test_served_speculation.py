"""Drafts from the SDK to a worker and back: stop strings, samples, log-probabilities as without drafts."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from motet import Client, FinishReason, Generation
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import System
from tests.e2e.test_metrics import free_address
from tests.makers import make_adapter, make_checkpoint, make_tokenizer

PROMPT = [17, 18, 19, 20, 21] * 4
# Tokens that completions take turns with: greedy text over few tokens repeats itself soon.
FEW = dict.fromkeys(range(40, 46), 30.0)
FLAGS = ["--dtype", "bfloat16", "--num-blocks", "200", "--arena-bytes", "64MiB", "--max-model-len", "128"]


@dataclass(frozen=True)
class Served:
    """What both workers returned for each request, and the drafts that the second one's steps accepted."""

    plain: dict[str, Generation]
    drafted: dict[str, Generation]
    num_accepted: float


def requests_of(plain: Generation | None) -> dict[str, dict[str, Any]]:
    """By name. Stop strings are taken from the middle of a completion without one."""
    found: dict[str, dict[str, Any]] = {
        "greedy": {},
        "adapter": {"adapter": "one"},
        "samples": {"n": 3, "temperature": 0.5, "seed": 3},
        "logprobs": {"logprobs": 2, "adapter": "one"},
        "penalties": {"repetition_penalty": 1.05, "frequency_penalty": 0.1},
    }
    if plain is not None:
        text = plain.completions[0].text
        found |= {f"stop {at}": {"stop": text[at : at + 3]} for at in range(20, 26)}
    return found


def generate(client: Client, options: dict[str, Any]) -> Generation:
    defaults = {"max_tokens": 46, "ignore_eos": True, "logit_bias": FEW, "timeout_s": 60.0, "temperature": 0.0}
    return client.generate(PROMPT, **{**defaults, **options}).result()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("system")
    checkpoint = make_tokenizer(make_checkpoint(directory / "model", arch="llama"))
    address = free_address()
    control_flags = ["--dtype", "bfloat16", "--min-plan-steps", "4"]
    with System(checkpoint, directory, control_flags=control_flags) as system:
        client = system.client()
        client.adapters.register("one", make_adapter(directory / "one", checkpoint, seed=1))
        worker = system.start_worker("plain", FLAGS)
        greedy = generate(client, {})
        plain = {name: generate(client, options) for name, options in requests_of(greedy).items()}
        worker.stop()
        system.start_worker("drafts", [*FLAGS, "--speculative", "ngram", "--worker-metrics-listen", address])
        drafted = {name: generate(client, options) for name, options in requests_of(greedy).items()}
        yield Served(plain, drafted, accepted_at(address))


def accepted_at(address: str) -> float:
    """Drafts that the worker's steps accepted."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return next(sample.value for sample in samples if sample.name == "motet_accepted_tokens_total")


def test_every_completion_is_that_of_a_worker_without_drafts(served: Served) -> None:
    assert served.num_accepted > 50
    for name, plain in served.plain.items():
        drafted = served.drafted[name]
        for one, other in zip(drafted.completions, plain.completions, strict=True):
            assert (one.token_ids, one.text) == (other.token_ids, other.text), name
            assert one.finished.finish_reason is other.finished.finish_reason, name
            assert one.finished.usage.completion_tokens == other.finished.usage.completion_tokens, name
            assert one.logprobs == other.logprobs, name


def test_a_stop_string_within_accepted_drafts_ends_the_text_before_it(served: Served) -> None:
    whole = served.plain["greedy"].completions[0].text
    for at in range(20, 26):
        completion = served.drafted[f"stop {at}"].completions[0]
        assert completion.text == whole.partition(whole[at : at + 3])[0]
        assert completion.finished.finish_reason is FinishReason.STOP_STRING
    assert len({served.drafted[name].completions[0].text for name in ("greedy", "adapter", "penalties")}) >= 2
