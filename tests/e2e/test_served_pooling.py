"""Embeddings and classes of a served system: over gRPC, by the SDK and on the command line, beside generations."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import motet
import numpy as np
import pytest
import torch
from motet.cli.main import main
from tokenizers import Tokenizer

from tests.e2e.harness import System
from tests.e2e.test_scheduled_pooling import classes_of
from tests.e2e.traffic import prompts
from tests.makers import make_adapter, make_checkpoint, make_classifier, make_tokenizer
from tests.oracle import Oracle

PROMPTS = prompts([3, 9, 40, 70], vocab_size=256, seed=11)
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "80", "--token-budget", "24"]
WORKER_FLAGS += ["--max-rows", "8", "--max-model-len", "128", "--arena-bytes", "64MiB"]
TOOL = "<tool>"
LABELS = {"0": "bad", "1": "fair", "2": "good"}

# PEFT says that it does not know id2label, which it leaves alone.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Unexpected keyword arguments:UserWarning", "ignore:Setting `save_embedding_layers`"
)


@dataclass(frozen=True)
class Served:
    system: System
    checkpoint: Path
    oracle: Oracle
    directories: dict[str, Path]

    @property
    def client(self) -> motet.Client:
        return self.system.client()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("system")
    # Two ids of the vocabulary are not tokens of the tokenizer.
    checkpoint = make_tokenizer(make_checkpoint(directory / "model", arch="llama", vocab_size=258))
    plain = make_adapter(directory / "plain", checkpoint, rank=8, targets=["q_proj", "down_proj"], seed=2)
    targets = ["q_proj", "v_proj"]
    directories = {
        "plain": plain,
        "mood": make_classifier(directory / "mood", checkpoint, num_labels=3, target_modules=targets, seed=3),
        "reward": make_classifier(directory / "reward", checkpoint, num_labels=1, target_modules=targets, seed=4),
    }
    # A token of its own, in its tokenizer and behind the base model's in its vocabulary.
    directories["tool"] = make_adapter(directory / "tool", checkpoint, targets=["q_proj"], resize=259, seed=5)
    # A classifier that gives an id of the base model its first meaning.
    directories["marked"] = make_classifier(directory / "marked", checkpoint, target_modules=targets, seed=6)
    for name, tokens in (("tool", ["<first>", "<second>", TOOL]), ("marked", [TOOL])):
        own = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        own.add_tokens(tokens)
        own.save(str(directories[name] / "tokenizer.json"))
    config_file = directories["mood"] / "adapter_config.json"
    config = json.loads(config_file.read_text("utf-8")) | {"id2label": LABELS}
    config_file.write_text(json.dumps(config), "utf-8")
    with System(checkpoint, directory) as system:
        client = system.client()
        for name, path in directories.items():
            client.adapters.register(name, path)
        system.start_worker(flags=WORKER_FLAGS)
        yield Served(system, checkpoint, Oracle(checkpoint, {"plain": plain}), directories)


def unit(vector: torch.Tensor) -> list[float]:
    return [float(value) for value in vector / vector.norm()]


def close(values: object) -> object:
    return pytest.approx(values, abs=1e-4, rel=1e-4)


def test_embeddings_of_base_and_adapter_are_those_of_transformers(served: Served) -> None:
    for adapter in ("", "plain"):
        found = served.client.embed(PROMPTS, adapter=adapter)
        assert found.normalized and found.pooling is motet.Pooling.LAST
        assert found.adapter == (f"adapters/{adapter}" if adapter else "")
        for prompt, embedding in zip(PROMPTS, found.embeddings, strict=True):
            assert embedding.values == close(unit(served.oracle.hidden(prompt, adapter)[-1]))
            assert embedding.prompt_tokens == len(prompt)
    mean = served.client.embed(PROMPTS[2], pooling="mean", normalize=False)
    assert mean.embeddings[0].values == close(served.oracle.hidden(PROMPTS[2]).mean(dim=0).tolist())
    assert mean.embeddings[0].cached_tokens == 0  # though the prompt is cached: its hidden states are not
    short = served.client.embed(list(PROMPTS[0]), dimensions=4).embeddings[0]
    assert short.values == close(unit(served.oracle.hidden(PROMPTS[0])[-1][:4]))


def test_a_text_is_tokenised_and_its_beginning_comes_from_the_prefix_cache(served: Served) -> None:
    text = "Whatever is embedded twice is computed once."
    first, second = (served.client.embed(text, cache_salt="twice") for _ in range(2))
    assert first.embeddings[0].cached_tokens == 0 < second.embeddings[0].cached_tokens
    np.testing.assert_allclose(first.embeddings[0].values, second.embeddings[0].values, atol=1e-5)


def test_a_text_is_tokenised_with_the_tokens_that_its_adapter_adds(served: Served) -> None:
    texts = ["ab" + TOOL, TOOL, "ab"]
    counts = {
        name: [each.prompt_tokens for each in served.client.embed(texts, adapter=name).embeddings]
        for name in ("tool", "plain", "")
    }
    assert counts == {"tool": [3, 1, 2], "plain": [8, 6, 2], "": [8, 6, 2]}


def test_classes_are_those_of_transformers_with_the_adapters_labels(served: Served) -> None:
    found = served.client.classify(PROMPTS, adapter="mood")
    assert found.labels == ("bad", "fair", "good") and found.problem_type is motet.ProblemType.SINGLE_LABEL
    for prompt, each in zip(PROMPTS, found.classifications, strict=True):
        logits = classes_of(served.checkpoint, served.directories["mood"], prompt, 3)
        assert each.logits == close(logits.tolist())
        assert each.probabilities == close(logits.softmax(dim=0).tolist())
        assert each.label == found.labels[int(logits.argmax())]
    both = served.client.classify([PROMPTS[0]], adapter="mood", problem_type="multi_label").classifications[0]
    assert both.probabilities == close([1 / (1 + math.exp(-logit)) for logit in both.logits])
    reward = served.client.classify([PROMPTS[1]], adapter="reward")
    assert reward.problem_type is motet.ProblemType.REGRESSION and reward.labels == ("LABEL_0",)
    truth = classes_of(served.checkpoint, served.directories["reward"], PROMPTS[1], 1)
    assert reward.classifications[0].logits == close(truth.tolist())
    assert reward.classifications[0].probabilities == ()


def test_a_text_is_classified_with_the_tokens_that_its_adapter_adds(served: Served) -> None:
    text = "ab" + TOOL + "c"
    for name, num_tokens in (("marked", 4), ("mood", 9)):
        directory = served.directories[name]
        own = directory if name == "marked" else served.checkpoint
        prompt = Tokenizer.from_file(str(own / "tokenizer.json")).encode(text).ids
        assert len(prompt) == num_tokens and (256 in prompt) == (name == "marked")
        found = served.client.classify(text, adapter=name).classifications[0]
        assert found.prompt_tokens == num_tokens
        assert found.logits == close(classes_of(served.checkpoint, directory, tuple(prompt), 3).tolist())


def test_the_record_of_an_adapter_shows_its_labels(served: Served) -> None:
    version = served.client.adapters.get("mood").active_version
    assert version is not None and (version.num_labels, version.class_labels) == (3, ("bad", "fair", "good"))
    plain = served.client.adapters.get("plain").active_version
    assert plain is not None and plain.num_labels == 0


def test_an_adapter_without_a_score_head_has_no_classes(served: Served) -> None:
    with pytest.raises(motet.FailedPrecondition, match="plain has no score head") as refused:
        served.client.classify("x", adapter="plain")
    assert refused.value.reason == "POOLING_NOT_SERVED"


def test_embeddings_classes_and_generations_run_beside_one_another(served: Served) -> None:
    client = served.client
    alone = client.embed(PROMPTS, adapter="mood").embeddings
    with ThreadPoolExecutor(8) as pool:
        generations = [
            pool.submit(lambda p, a: client.generate(p, adapter=a, max_tokens=20, ignore_eos=True).result(), p, a)
            for p in PROMPTS
            for a in ("", "plain")
        ]
        embeddings = [pool.submit(client.embed, PROMPTS, adapter="mood", pooling=kind) for kind in ("last", "mean")]
        classes = [pool.submit(client.classify, PROMPTS, adapter=name) for name in ("mood", "reward")]
        for number, prompt in enumerate(PROMPTS):
            for which, adapter in enumerate(("", "plain")):
                completion = generations[2 * number + which].result().completions[0]
                served.oracle.num_agreed(prompt, completion.token_ids, adapter)
        for prompt, each in zip(PROMPTS, classes[0].result().classifications, strict=True):
            truth = classes_of(served.checkpoint, served.directories["mood"], prompt, 3)
            assert each.logits == close(truth.tolist())
        for first, second in zip(alone, embeddings[0].result().embeddings, strict=True):
            np.testing.assert_allclose(first.values, second.values, atol=1e-5)
    assert client.status().queues.num_requests == 0


def test_the_asyncio_client_returns_the_same(served: Served) -> None:
    async def call() -> tuple[motet.Embeddings, motet.Classifications]:
        async with motet.AsyncClient(served.system.address) as client:
            return await client.embed(PROMPTS), await client.classify(PROMPTS, adapter="mood")

    embedded, classified = asyncio.run(call())
    assert [e.values for e in embedded.embeddings] == [close(e.values) for e in served.client.embed(PROMPTS).embeddings]
    assert classified.labels == ("bad", "fair", "good")


def test_the_command_line_prints_a_line_for_each_text(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--server", served.system.address]
    assert main(["embed", "one text", "another", "--dimensions", "2", *server]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(line) for line in lines] == [2, 2]
    assert main(["classify", "one text", "--adapter", "mood", *server]) == 0
    label, rest = capsys.readouterr().out.split("\t")
    assert label in LABELS.values() and all(f"{name} 0." in rest for name in LABELS.values())
    assert main(["classify", "1 2 3", "--token-ids", "--adapter", "reward", "--json", *server]) == 0
    assert json.loads(capsys.readouterr().out)["classifications"][0]["prompt_tokens"] == 3


def test_a_call_whose_worker_dies_is_computed_by_another(served: Served, tmp_path: Path) -> None:
    slow = ["-m", "tests.fakes.hash_worker"]
    with System(served.checkpoint, tmp_path) as system:
        client = system.client()
        first = system.start_worker("w0", ["--step-time-ms", "300"], command=slow)
        expected = client.embed(PROMPTS)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.embed, PROMPTS, cache_salt="anew")
            first.kill()
            system.start_worker("w1", command=slow)
            assert [e.values for e in call.result().embeddings] == [e.values for e in expected.embeddings]


def test_a_call_ends_at_its_deadline_and_gives_its_rows_back(served: Served, tmp_path: Path) -> None:
    with System(served.checkpoint, tmp_path) as system:
        client = system.client()
        system.start_worker("w0", ["--step-time-ms", "400"], command=["-m", "tests.fakes.hash_worker"])
        with pytest.raises(motet.DeadlineExceeded):
            client.embed(PROMPTS, timeout_s=0.2)
        assert len(client.embed(PROMPTS).embeddings) == len(PROMPTS)
        assert client.status().queues.num_requests == 0


def test_stored_labels_outlive_a_restart_of_the_server(served: Served, tmp_path: Path) -> None:
    with System(served.checkpoint, tmp_path) as system:
        system.client().adapters.register("mood", served.directories["mood"])
        system.control_plane.kill()
        system.start_control_plane()
        client = system.client()
        version = client.adapters.get("mood").active_version
        assert version is not None and version.class_labels == ("bad", "fair", "good")
