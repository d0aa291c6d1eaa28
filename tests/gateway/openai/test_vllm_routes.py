"""Routes that vLLM's server has, and those of probes and of Prometheus."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
import motet
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.vllm.messages import TokenizeBody
from gateway.vllm.tokenization import MAX_TOKENS_AT_ONCE, tokenized
from tests.gateway.openai.conftest import PROMPT, WAIT_S, Served

MESSAGES = [{"role": "user", "content": "a"}]


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{served.gateway.url}{path}", json=body, timeout=WAIT_S)


@pytest.mark.parametrize("model", [None, "test/tiny", "legal", "legal@1"])
def test_a_text_becomes_the_tokens_of_the_rpc_and_these_the_text(served: Served, model: str | None) -> None:
    body: dict[str, Any] = {} if model is None else {"model": model}
    expected = served.client.model.tokenize(PROMPT, return_tokens=True)
    found = post(served, "/tokenize", {**body, "prompt": PROMPT}).json()
    assert found == {
        "count": len(expected.token_ids),
        "max_model_len": 128,
        "tokens": list(expected.token_ids),
        "token_strs": None,
    }
    texts = post(served, "/tokenize", {**body, "prompt": PROMPT, "return_token_strs": True}).json()["token_strs"]
    assert len(texts) == found["count"]
    plain = post(served, "/tokenize", {**body, "prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    assert post(served, "/detokenize", {**body, "tokens": plain}).json() == {"prompt": PROMPT}


async def test_a_text_of_many_tokens_lets_other_requests_go_on_while_they_are_written() -> None:
    num_tokens = 3 * MAX_TOKENS_AT_ONCE
    found = motet.Tokenized(tuple(range(num_tokens)), (b"x",) * num_tokens, 128, "", "", "", None)
    client = SimpleNamespace(model=SimpleNamespace(tokenize=AsyncMock(return_value=found)))
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    reply = await tokenized(TokenizeBody(prompt="x", return_token_strs=True), cast("Any", None), cast("Any", client))
    task.cancel()
    assert num_turns == 2 and reply["token_strs"] == ["x"] * num_tokens


def test_a_version_by_its_digest_has_its_tokenizer(served: Served) -> None:
    version = served.client.adapters.get("legal").active_version
    assert version is not None
    model = f"legal@{version.digest[:12]}"
    tokens = post(served, "/tokenize", {"model": model, "prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    assert post(served, "/detokenize", {"model": model, "tokens": tokens}).json() == {"prompt": PROMPT}


def test_a_conversation_becomes_tokens(served: Served) -> None:
    expected = served.client.model.tokenize(MESSAGES).token_ids
    assert post(served, "/tokenize", {"model": "legal", "messages": MESSAGES}).json()["tokens"] == list(expected)
    without = post(served, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert without["count"] <= len(expected)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": "nobody", "prompt": "a"}, 404, "model"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "other": 1}, 400, "other"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
        ("/detokenize", {"model": "nobody", "tokens": [1]}, 404, "model"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = post(served, path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


def test_probes_and_the_version_need_no_key(served: Served) -> None:
    for path in ("/health", "/healthz", "/readyz"):
        assert httpx.get(served.gateway.url + path, timeout=WAIT_S).status_code == 200
    assert httpx.get(f"{served.gateway.url}/version", timeout=WAIT_S).json() == {"version": motet.__version__}
    refused = httpx.get(f"{served.gateway.url}/tokenize", timeout=WAIT_S)
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"


def test_requests_are_counted_by_route_and_status(served: Served) -> None:
    def samples() -> dict[tuple[str, str, str], float]:
        """Values by name, route and status or bound, summed over all methods."""
        values: dict[tuple[str, str, str], float] = defaultdict(float)
        text = httpx.get(f"{served.gateway.url}/metrics", timeout=WAIT_S).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                label = sample.labels.get("status", sample.labels.get("le", ""))
                values[sample.name, sample.labels.get("route", ""), label] += sample.value
        return values

    count = "motet_gateway_requests_total"
    before = samples()
    httpx.get(f"{served.gateway.url}/v1/models/legal", timeout=WAIT_S)
    for _ in range(2):
        httpx.get(f"{served.gateway.url}/v1/models/nobody", timeout=WAIT_S)
        httpx.get(f"{served.gateway.url}/nothing/{PROMPT}", timeout=WAIT_S)
    served.api.completions.create(model="legal", prompt=PROMPT, max_tokens=1, stream=True).close()
    after = samples()

    def grown(name: str, route: str, label: str = "") -> float:
        return after.get((name, route, label), 0) - before.get((name, route, label), 0)

    assert grown(count, "/v1/models/{model:path}", "200") == 1
    assert grown(count, "/v1/models/{model:path}", "404") == 2
    assert grown(count, "none", "404") == 2
    assert grown("motet_gateway_time_to_first_byte_seconds_count", "/v1/completions") == 1
    assert after["motet_gateway_streams_open", "", ""] == 0
    assert after["motet_gateway_requests_open", "", ""] == 1, "this one"
    assert not any(PROMPT in part for key in after for part in key)
