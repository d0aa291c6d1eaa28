"""What the real client gets of completions and chat completions, against the SDK, transformers and PEFT."""

from __future__ import annotations

from typing import Any

import pytest
from motet import Generation

from tests.gateway.openai.conftest import NUM_TOKENS, PROMPT, Served

MESSAGES: list[Any] = [{"role": "user", "content": "Is it valid?"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
# Names, and the adapters that they stand for.
MODELS = [("test/tiny", ""), ("model", ""), ("legal", "legal"), ("medical", "medical"), ("test/tiny:legal", "legal")]


def generated(served: Served, prompt: Any, adapter: str, **options: Any) -> Generation:
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, **options}
    return served.client.generate(prompt, adapter=adapter, **given).result()


@pytest.mark.parametrize(("model", "adapter"), MODELS)
def test_a_completion_is_what_the_sdk_and_peft_generate(served: Served, model: str, adapter: str) -> None:
    tokens = list(served.client.model.tokenize(PROMPT).token_ids)
    extra = {"ignore_eos": True}
    reply = served.api.completions.create(model=model, prompt=PROMPT, extra_body=extra, **GREEDY)
    expected = served.oracle.greedy(tokens, NUM_TOKENS, adapter)
    assert expected.is_decisive
    same = generated(served, PROMPT, adapter, ignore_eos=True)
    assert same.token_ids == tuple(expected.token_ids) and reply.choices[0].text == same.text
    assert reply.model == model and reply.choices[0].finish_reason == "length"
    by_ids = served.api.completions.create(model=model, prompt=tokens, extra_body=extra, **GREEDY)
    assert by_ids.choices[0].text == same.text
    digest = same.started.adapter_digest or same.started.model_fingerprint
    assert reply.system_fingerprint == f"fp_{digest[:16]}"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(tokens), NUM_TOKENS)
    assert reply.usage.total_tokens == len(tokens) + NUM_TOKENS


def test_base_and_adapters_differ_on_the_prompts_that_the_tests_use(served: Served) -> None:
    assert (
        len({generated(served, PROMPT, adapter, ignore_eos=True).token_ids for adapter in ("", "legal", "medical")})
        == 3
    )


@pytest.mark.parametrize(("model", "adapter"), MODELS)
def test_a_chat_completion_is_what_the_sdk_generates(served: Served, model: str, adapter: str) -> None:
    reply = served.api.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    same = generated(served, MESSAGES, adapter)
    assert reply.choices[0].message.content == same.text and reply.choices[0].message.role == "assistant"
    assert reply.usage is not None and reply.usage.prompt_tokens == same.started.prompt_tokens


def test_a_stream_of_chat_has_a_role_then_text_then_a_reason_and_the_usage_last(served: Served) -> None:
    whole = served.api.chat.completions.create(model="legal", messages=MESSAGES, **GREEDY)
    with served.api.chat.completions.create(
        model="legal", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        *chunks, last = list(stream)
    assert last.choices == [] and last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and deltas[0].content == ""
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1) and reasons[-1] == whole.choices[0].finish_reason
    assert deltas[-1].content is None and all(chunk.usage is None for chunk in chunks)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in [*chunks, last]}) == 1


def test_streams_of_several_prompts_and_samples_are_the_whole_reply(served: Served) -> None:
    request: dict[str, Any] = {
        "model": "legal",
        "prompt": [PROMPT, "Once"],
        "n": 2,
        "seed": 5,
        "max_tokens": NUM_TOKENS,
    }
    whole = served.api.completions.create(**request)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = ["", "", "", ""]
    with served.api.completions.create(**request, stream=True) as stream:
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    first = served.client.generate(
        PROMPT, adapter="legal", n=2, seed=5, temperature=1.0, max_tokens=NUM_TOKENS
    ).result()
    assert texts[:2] == [completion.text for completion in first.completions]


def test_a_stop_string_ends_a_completion_and_echo_begins_it_with_the_prompt(served: Served) -> None:
    text = generated(served, PROMPT, "legal", ignore_eos=True).text
    stop = text[len(text) // 2]
    reply = served.api.completions.create(
        model="legal", prompt=PROMPT, stop=stop, echo=True, extra_body={"ignore_eos": True}, **GREEDY
    )
    assert reply.choices[0].text == PROMPT + text.partition(stop)[0] and reply.choices[0].finish_reason == "stop"
    tokens = list(served.client.model.tokenize(PROMPT).token_ids)
    echoed = served.api.completions.create(model="legal", prompt=tokens, stop=stop, echo=True, **GREEDY)
    assert echoed.choices[0].text.startswith(PROMPT)


def test_logprobs_have_tokens_bytes_and_the_most_likely_ones(served: Served) -> None:
    same = generated(served, MESSAGES, "medical", logprobs=2, token_bytes=True)
    reply = served.api.chat.completions.create(
        model="medical", messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    expected = same.completions[0].logprobs
    assert [bytes(each.bytes or []) for each in logprobs.content] == [each.token for each in expected]
    assert [each.logprob for each in logprobs.content] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    for shown, one in zip(logprobs.content, expected, strict=True):
        assert [bytes(top.bytes or []) for top in shown.top_logprobs] == [top.token for top in one.top]


def test_logprobs_of_completions_are_the_same_streamed(served: Served) -> None:
    request: dict[str, Any] = {"model": "legal", "prompt": PROMPT, "logprobs": 2, **GREEDY}
    whole = served.api.completions.create(**request).choices[0].logprobs
    assert whole is not None and whole.tokens and whole.text_offset and whole.top_logprobs
    assert whole.text_offset[0] == 0 and all(2 <= len(top) <= 3 for top in whole.top_logprobs)
    tokens: list[str] = []
    offsets: list[int] = []
    with served.api.completions.create(**request, stream=True) as stream:
        for chunk in stream:
            if (part := chunk.choices[0].logprobs) is not None:
                tokens += part.tokens or []
                offsets += part.text_offset or []
    assert (tokens, offsets) == (whole.tokens, whole.text_offset)


def test_tools_are_given_to_the_template(served: Served) -> None:
    tool: Any = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    turns: list[Any] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", **tool, "function": {"name": "look_up", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "yes"},
    ]
    reply = served.api.chat.completions.create(model="legal", messages=turns, tools=[tool], **GREEDY)
    same = generated(served, turns, "legal", tools=[tool])
    assert reply.choices[0].message.content == same.text
