"""Constrained completions of the served system: valid to the last token, the same in any batch, and errors by field.

The model is random, the KV cache too small for all requests: rows are preempted and begin again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from motet import (
    BeamSearch,
    Choices,
    Client,
    FinishReason,
    InvalidArgument,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
    StructuralTags,
)
from motet.cli.main import main
from tokenizers import Tokenizer

from tests.e2e.harness import System, wait_until
from tests.makers import make_adapter, make_checkpoint, make_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_new": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "count", "is_new"],
    "additionalProperties": False,
}
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "320", "--max-rows", "6"]
WORKER_FLAGS += ["--max-model-len", "512", "--num-slots", "2", "--arena-bytes", "64MiB"]
SAMPLED: Any = {"temperature": 1.0, "max_tokens": 300}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("system")
    checkpoint = make_checkpoint(directory / "model", arch="llama")
    make_tokenizer(checkpoint)
    adapter = make_adapter(directory / "adapter", checkpoint, rank=8, alpha=16, targets=["q_proj"], seed=2)
    with System(checkpoint, directory) as system:
        client = system.client()
        client.adapters.register("one", adapter)
        system.start_worker(flags=WORKER_FLAGS)
        yield system


@pytest.fixture(scope="module")
def client(system: System) -> Client:
    return system.client()


@pytest.fixture
def address(system: System) -> str:
    return system.address


def test_every_form_holds_in_a_full_batch_and_alone(client: Client) -> None:
    forms: list[Any] = [
        JsonSchema(SCHEMA),
        Regex("[a-f]{3}-[0-9]{4}"),
        Choices(["red", "green", "dark blue \u00e9"]),
        Lark('start: "<" WORD ">"\nWORD: /[xyz]{2,5}/\n'),
    ]
    jobs = [(form, adapter, seed) for form in forms for adapter in ("", "one") for seed in (1, 2)]

    def ask(job: tuple[Any, str, int]) -> tuple[str, FinishReason, tuple[int, ...]]:
        form, adapter, seed = job
        done = client.generate("Go:", constraint=form, adapter=adapter, seed=seed, **SAMPLED).result()
        return done.text, done.finished.finish_reason, tuple(done.token_ids)

    with ThreadPoolExecutor(len(jobs)) as threads:
        together = list(threads.map(ask, jobs))
    for (form, _, _), (text, reason, _) in zip(jobs, together, strict=True):
        assert reason is FinishReason.STOP_TOKEN
        if isinstance(form, JsonSchema):
            jsonschema.validate(json.loads(text), SCHEMA)
        elif isinstance(form, Regex):
            assert re.fullmatch(form.pattern, text)
        elif isinstance(form, Choices):
            assert text in form.texts
        else:
            assert re.fullmatch("<[xyz]{2,5}>", text)
    for index in (0, 3, 6, 9, 13):
        assert ask(jobs[index]) == together[index]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*embedding layer has been resized")
def test_an_adapter_with_more_tokens_is_constrained_and_others_beside_it(
    system: System, client: Client, tmp_path: Path
) -> None:
    """Either ended the session of the worker: the requests went from worker to worker."""
    both = ["embed_tokens", "lm_head"]
    wide = make_adapter(tmp_path / "wide", system.model_dir, rank=4, resize=300, modules_to_save=both)
    tokenizer = Tokenizer.from_file(str(system.model_dir / "tokenizer.json"))
    tokenizer.add_tokens([f"neu{index}" for index in range(256, 300)])
    tokenizer.save(str(wide / "tokenizer.json"))
    client.adapters.register("wide", wide)
    epoch = client.status().workers[0].epoch
    forms = {("", 0): Regex("[a-f]{3}"), ("wide", 0): Regex("(neu2[0-9]{2} ){2}neu299"), ("wide", 1): None}

    def ask(job: tuple[str, int]) -> tuple[str, int]:
        tokens = {"constraint": forms[job], "seed": 3} if forms[job] is not None else {"seed": 4}
        done = client.generate("Go:", adapter=job[0], temperature=1.0, max_tokens=40, **tokens).result()
        return done.text, max(done.token_ids)

    with ThreadPoolExecutor(3) as threads:
        texts = dict(zip(forms, threads.map(ask, forms), strict=True))
    assert re.fullmatch("[a-f]{3}", texts["", 0][0])
    assert re.fullmatch("(neu2[0-9]{2} ){2}neu299", texts["wide", 0][0])
    assert client.status().workers[0].epoch == epoch, "no session ended"


def test_a_json_object_and_tags_are_followed(client: Client) -> None:
    done = client.generate("Go:", constraint=JsonObject(), seed=4, temperature=1.0, max_tokens=40).result()
    assert done.text.startswith("{")
    tag = StructuralTag(trigger="<", begin="<call>", end="</call>", json_schema={"enum": [1]})
    text = (
        client.generate(
            "Go:",
            constraint=StructuralTags([tag]),
            seed=5,
            temperature=1.0,
            max_tokens=60,
            logit_bias={_token("<"): 9.0},
        )
        .result()
        .text
    )
    assert "<call>1</call>" in text
    assert re.fullmatch(r"([^<]|<call>1</call>)*(<(c(a(l(l(>(1(<(/(c(a(l(l)?)?)?)?)?)?)?)?)?)?)?)?)?", text)


def test_samples_of_one_request_each_follow_it(client: Client) -> None:
    every: list[Any] = [{"n": 4}, {"n": 2, "best_of": 4, "logprobs": 1}]
    for options in every:
        done = client.generate("Go:", constraint=JsonSchema(SCHEMA), seed=9, **options, **SAMPLED).result()
        assert len(done.completions) == options["n"]
        for completion in done.completions:
            jsonschema.validate(json.loads(completion.text), SCHEMA)
    assert len({completion.text for completion in done.completions}) > 1


def test_the_end_of_the_grammar_wins_over_min_tokens_and_biases(client: Client) -> None:
    done = client.generate(
        "Go:", constraint=Choices(["ab", "ac"]), min_tokens=20, max_tokens=30, logit_bias={_token("b"): -100.0}
    ).result()
    assert done.text == "ac" and done.finished.finish_reason is FinishReason.STOP_TOKEN
    stopped = client.generate("Go:", constraint=Choices(["abcd"]), stop="c", max_tokens=30).result()
    assert stopped.text == "ab" and stopped.finished.finish_reason is FinishReason.STOP_STRING
    assert len(client.generate("Go:", max_tokens=4, ignore_eos=True).result().token_ids) == 4


@pytest.mark.parametrize(
    ("form", "field", "reason"),
    [
        (JsonSchema({"type": "object", "not": {}}), "constraint.json_schema", "not"),
        (JsonSchema("{"), "constraint.json_schema", "not JSON"),
        (JsonSchema({"type": "object", "x-guidance": {"lenient": True}}), "constraint.json_schema", "x-guidance"),
        (Regex("(?=a)b"), "constraint.regex", "look-around"),
        (Regex(""), "constraint.regex", "empty"),
        (Lark("start: nothing"), "constraint.lark", "unknown name"),
        (Choices([]), "constraint.choices", "0 texts"),
        (Lark("start: " + "(" * 20000), "constraint.lark", ""),
        (JsonSchema("[" * 30000), "constraint.json_schema", ""),
        (Regex("x" * 70000), "constraint", "65536"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_refused_by_field(
    client: Client, form: Any, field: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        client.generate("Go:", constraint=form, max_tokens=4).result()
    assert field in {violation.field for violation in refused.value.field_violations}
    assert reason in str(refused.value).replace(",", "")
    assert client.generate("Go:", constraint=Choices(["a"]), max_tokens=4).result().text == "a"


def test_what_a_constraint_cannot_be_combined_with_is_refused(client: Client) -> None:
    every: list[Any] = [{"beam_search": BeamSearch(2)}, {"ignore_eos": True}]
    for options in every:
        with pytest.raises(InvalidArgument, match=r"constraint: is set with"):
            client.generate("Go:", constraint=Choices(["a"]), max_tokens=4, **options).result()


def test_the_command_line_takes_every_form(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schema").write_text(json.dumps({"enum": ["y"]}), encoding="utf-8")
    (tmp_path / "grammar").write_text('start: "zz"', encoding="utf-8")
    for flags, text in (
        (["--regex", "q{3}"], "qqq"),
        (["--choice", "one"], "one"),
        (["--json-schema", str(tmp_path / "schema")], '"y"'),
        (["--grammar", str(tmp_path / "grammar")], "zz"),
    ):
        assert main(["generate", "Go:", "--server", address, *flags]) == 0
        assert capsys.readouterr().out == text + "\n"


def test_a_killed_workers_constrained_completions_go_on_elsewhere_with_the_same_tokens(
    system: System, client: Client
) -> None:
    """Adapters, samples and seeds; the second worker makes the grammars' states anew from the tokens so far."""
    forms: list[Any] = [Regex("[a-f]{100}-[0-9]{120}"), Lark('start: "<" WORD ">"\nWORD: /[xyz]{200}/\n')]
    jobs = [(form, adapter, seed) for form in forms for adapter in ("", "one") for seed in (1, 2, 3)]

    def ask(job: tuple[Any, str, int]) -> list[tuple[int, ...]]:
        form, adapter, seed = job
        options: Any = {**SAMPLED, "n": 2 if seed == 3 else 1}
        done = client.generate("Go:", constraint=form, adapter=adapter, seed=seed, **options).result()
        pattern = form.pattern if isinstance(form, Regex) else "<[xyz]{200}>"
        assert all(re.fullmatch(pattern, completion.text) for completion in done.completions)
        return [tuple(completion.token_ids) for completion in done.completions]

    undisturbed = [ask(job) for job in jobs]
    system.start_worker("w1", WORKER_FLAGS)
    migrated, sampled = client.status().queues.num_migrated, _num_sampled_by(client, "w0")
    with ThreadPoolExecutor(len(jobs)) as threads:
        futures = [threads.submit(ask, job) for job in jobs]
        wait_until(lambda: _num_sampled_by(client, "w0") > sampled + 100, "w0 generates")
        system.workers["w0"].kill()
        assert [future.result() for future in futures] == undisturbed
    status = client.status()
    assert status.queues.num_migrated > migrated and [worker.worker_id for worker in status.workers] == ["w1"]


def _num_sampled_by(client: Client, worker_id: str) -> int:
    return {worker.worker_id: worker.num_tokens_sampled for worker in client.status().workers}[worker_id]


def _token(symbol: str) -> int:
    """The token of an ASCII symbol in the tokenizer of make_tokenizer: "!" is the first one behind two special ones."""
    return ord(symbol) - ord("!") + 2
