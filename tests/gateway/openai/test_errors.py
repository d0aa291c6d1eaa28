"""What is refused, with which status, field and headers; and what a client that leaves leaves behind."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from motet import ResourceExhausted, Unavailable

from gateway.http.errors import Refusal
from gateway.openai.errors import error_body, refusal_of
from tests.e2e.harness import wait_until
from tests.gateway.openai.conftest import PROMPT, WAIT_S, Served

MESSAGES: list[Any] = [{"role": "user", "content": "a"}]


@pytest.fixture
def stopped_worker(served: Served) -> Iterator[None]:
    """Nothing is computed until the test ends."""
    worker = served.system.workers["w0"]
    worker.send(signal.SIGSTOP)
    yield
    worker.send(signal.SIGCONT)
    wait_until(lambda: len(served.client.status().workers) == 1, "the worker is back")


def test_top_logprobs_of_0_ask_for_nothing(served: Served) -> None:
    reply = served.api.chat.completions.create(
        model="model", messages=MESSAGES, max_tokens=1, logprobs=False, top_logprobs=0
    )
    assert reply.choices[0].logprobs is None


def test_a_refusal_names_fields_as_bodies_have_them(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.api.completions.create(model="model", prompt="a", max_tokens=4, extra_body={"min_tokens": 5})
    body: Any = caught.value.body
    assert body["message"] == "min_tokens: is 5; give at most max_tokens, 4"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {}),
        ("functions", []),
        ("function_call", "auto"),
        ("audio", {}),
        ("prediction", {}),
        ("web_search_options", {}),
        ("chat_template", "x"),
        ("response_format", {"type": "xml"}),
        ("structured_outputs", {}),
        ("tool_choice", "required"),
        ("store", True),
        ("modalities", ["audio"]),
        ("top_logprobs", 2),
        ("temperature", "hot"),
        ("temperature", 101),
        ("max_tokens", 0),
        ("top_p", 0),
        ("n", 0),
        ("logit_bias", {"x": 1}),
        ("stream_options", {"include_usage": True}),
        ("use_beam_search", True),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_name(served: Served, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.api.chat.completions.create(model="legal", messages=MESSAGES, extra_body={field: value})
    assert raised.value.param == field and raised.value.type == "invalid_request_error"
    assert field in raised.value.message


@pytest.mark.parametrize(
    ("field", "extra"),
    [
        ("messages[1].content", {"messages": [*MESSAGES, {"role": "user", "content": 5}]}),
        ("messages[1].content[0]", {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages[0]", {"messages": [{"role": "user"}]}),
        ("seed", {"seed": 2**64}),
        ("temperature", {"temperature": -1}),
        ("n", {"n": 100}),
        ("stop", {"stop": ["a"] * 17}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": 1}}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 10**9, "stream": True}),
    ],
)
def test_a_part_of_a_field_is_named_with_its_place(served: Served, field: str, extra: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.api.chat.completions.create(model="legal", messages=MESSAGES, extra_body=extra)
    assert raised.value.param == field, raised.value.message
    assert f"{field}: " in raised.value.message, "the message names the field of the body"


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: is 0"),
        ("/v1/completions", {"prompt": [1, 99999]}, "prompt", "prompt[1]: 99999"),
        ("/v1/completions", {"prompt": "x", "best_of": 2, "n": 3}, "best_of", "best_of: is 2"),
        ("/v1/completions", {"prompt": "x", "n": 100}, "n", "n: 100 sequences"),
        ("/v1/completions", {"prompt": "x", "best_of": 100}, "best_of", "best_of: 100 sequences"),
        ("/v1/completions", {"prompt": "x", "priority": 101}, "priority", "priority: is 101; give a value from -100"),
        ("/v1/embeddings", {"input": "x", "priority": -101}, "priority", "priority: is -101; give a value from -100"),
        ("/v1/embeddings", {"input": [[1, 99999]]}, "input", "input[0].token_ids.ids[1]: 99999"),
    ],
)
def test_a_message_begins_with_the_field_that_the_body_has(
    served: Served, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    response = httpx.post(served.gateway.url + path, json={"model": "legal", **body}, timeout=WAIT_S)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and error["message"].startswith(said), error


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "/tokenize/", "/v1/adapters/legal/", "/health/", "/v1", "/api/v1"]
)
def test_a_slash_too_many_is_404_and_no_redirect(served: Served, path: str) -> None:
    """A redirect would have been to http, and behind a proxy with TLS the key would have gone there in plain text."""
    response = httpx.post(served.gateway.url + path, json={}, headers={"host": "localhost"}, timeout=WAIT_S)
    assert response.status_code == 404 and "location" not in response.headers


def test_what_is_wrong_behind_a_field_that_is_not_known_is_refused_too(served: Served) -> None:
    for body in (b'{"wrong": 1, "z": ' + b"[" * 3000 + b"]" * 3000 + b"}", b'{"wrong": null, "z": "\xff"}'):
        response = httpx.post(f"{served.gateway.url}/v1/chat/completions", content=body, timeout=WAIT_S)
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_a_negative_seed_is_a_seed_of_its_own(served: Served) -> None:
    texts = [
        served.api.completions.create(model="legal", prompt=PROMPT, seed=seed, max_tokens=8).choices[0].text
        for seed in (-1, -1, 1, 2**64 - 1)
    ]
    assert texts[0] == texts[1] == texts[3] != texts[2]


def test_neutral_values_are_accepted(served: Served) -> None:
    neutral = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "stop": None,
        "top_k": -1,
        "a_field_of_the_future": None,
    }
    reply = served.api.chat.completions.create(model="legal", messages=MESSAGES, max_tokens=1, extra_body=neutral)
    assert reply.choices[0].finish_reason


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", {"a": [1] * 1000}),
        ("metadata", {"a": "x" * 513}),
        ("metadata", {"a" * 65: "x"}),
        ("metadata", {str(number): "x" for number in range(17)}),
        ("metadata", [1] * 1000),
        ("safety_identifier", "x" * 1025),
        ("prompt_cache_key", "x" * 1025),
        ("user", "x" * 1025),
    ],
)
def test_what_changes_nothing_takes_no_memory_while_a_stream_runs(
    served: Served, path: str, field: str, value: object
) -> None:
    """An attack would fill the memory with 32 MiB of it in each of many slow streams: a body is kept to its end."""
    given: dict[str, object] = {"prompt": PROMPT} if path == "/v1/completions" else {"input": PROMPT}
    if path == "/v1/chat/completions":
        given = {"messages": MESSAGES}
    response = httpx.post(f"{served.gateway.url}{path}", json={"model": "legal", **given, field: value}, timeout=WAIT_S)
    assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_a_part_that_is_no_text_and_a_body_that_is_no_json_are_refused(served: Served) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(openai.BadRequestError):
        served.api.chat.completions.create(model="legal", messages=image)
    response = httpx.post(f"{served.gateway.url}/v1/completions", content=b"{", timeout=WAIT_S)
    assert response.status_code == 400 and response.json()["error"]["message"]
    missing = httpx.get(f"{served.gateway.url}/v1/nothing", timeout=WAIT_S)
    assert missing.status_code == 404 and missing.json()["error"]["code"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_status_before_the_stream(served: Served, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.api.completions.create(model="legal", prompt=[5] * 500, stream=stream)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")


def test_of_several_prompts_the_one_that_is_too_long_is_named(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"this is about prompt number 1 of the list, counted from 0"):
        served.api.completions.create(model="legal", prompt=[[5, 6], [5] * 500, [7]])
    with pytest.raises(openai.BadRequestError) as raised:
        served.api.completions.create(model="legal", prompt=[[5, 6], [7]], temperature=-1)
    assert "of the list" not in raised.value.message


@pytest.mark.usefixtures("stopped_worker")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "Once"]])
def test_a_client_that_leaves_frees_its_rows(served: Served, stream: bool, prompt: Any) -> None:
    num_prompts = 1 if isinstance(prompt, str) else 2

    def num_requests() -> int:
        return served.client.status().queues.num_requests

    body = json.dumps({"model": "legal", "prompt": prompt, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, _, port = served.gateway.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(head + body)
        wait_until(lambda: num_requests() == num_prompts, "the requests are at the server")
    wait_until(lambda: num_requests() == 0, "they are cancelled there")


def test_the_time_to_wait_is_in_headers_and_a_long_one_is_not_waited_for() -> None:
    short = refusal_of(ResourceExhausted("full", retry_after_s=1.5))
    assert (short.status, short.headers["retry-after-ms"]) == (429, "1500")
    assert error_body(short)["error"]["code"] == "rate_limit_exceeded"
    long = refusal_of(ResourceExhausted("full", retry_after_s=121))
    assert long.headers["x-should-retry"] == "false"
    assert refusal_of(Unavailable("gone")).headers["retry-after"] == "1"
    assert error_body(Refusal(413, "long"))["error"]["param"] is None


def test_a_prompt_that_no_message_to_motet_can_carry_is_413_and_not_sent_again(served: Served) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        served.api.completions.create(model="legal", prompt="a" * 2_000_000)
    assert raised.value.status_code == 413
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert "larger than Motet takes in one message" in raised.value.message


def test_the_message_of_a_response_can_be_sent_back(served: Served) -> None:
    turns: list[Any] = [{"role": "user", "content": "Who pays?"}]
    message = served.api.chat.completions.create(model="legal", messages=turns, max_tokens=4).choices[0].message
    empty = {"annotations": [], "provider_specific_fields": {"refusal": None}}
    for back in (message, message.model_dump(), {**message.model_dump(), **empty}):
        again: list[Any] = [*turns, back, {"role": "user", "content": "Why?"}]
        assert served.api.chat.completions.create(model="legal", messages=again, max_tokens=2).choices
    refused: Any = [{**message.model_dump(), "refusal": "I do not"}]
    with pytest.raises(openai.BadRequestError, match="refusal"):
        served.api.chat.completions.create(model="legal", messages=refused, max_tokens=2)
