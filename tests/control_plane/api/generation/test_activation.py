"""Requests with activated adapters: where the adapter begins to act, and prompts that do not activate it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from motet.v1 import generation_pb2, types_pb2

from control_plane.registry.versions.invocation import last_occurrence
from control_plane.scheduler.types import FinishReason
from tests.control_plane.api.fake_adapters import DIGEST, adapter_record, adapter_version
from tests.control_plane.api.fakes import Api, job_event
from tests.control_plane.api.generation.calls import generate, ids_of, request, script

TOKENS = (6, 7)


def add(api: Api, tokens: tuple[int, ...] = TOKENS) -> None:
    version = replace(adapter_version(DIGEST), alora_invocation_tokens=tokens)
    api.registry.records["judge"] = adapter_record("judge", [version], DIGEST)


@pytest.mark.parametrize(
    ("prompt", "tokens", "start"),
    [
        ([6, 7], [6, 7], 0),
        ([6, 7, 6, 7, 6], [6, 7], 2),
        ([6, 6, 6], [6, 6], 1),
        ([7, 6], [6, 7], None),
        ([6], [6, 7], None),
        ([1, 2, 3], [3], 2),
        ([0, 256, 0], [1], None),
    ],
)
def test_the_last_occurrence_counts(prompt: list[int], tokens: list[int], start: int | None) -> None:
    assert last_occurrence(prompt, tokens) == start


@pytest.mark.parametrize(
    ("fields", "tokens", "start"),
    [
        ({"token_ids": types_pb2.TokenIds(ids=[5, 6, 7, 6, 7, 8])}, TOKENS, 3),
        ({"text": "hello a hello"}, tuple(ids_of("he", "ll", "o")), 5),
    ],
)
async def test_the_adapter_acts_from_there_on(
    api: Api, fields: dict[str, Any], tokens: tuple[int, ...], start: int
) -> None:
    add(api, tokens)
    script(api, job_event([5], FinishReason.LENGTH))
    await generate(api, request(adapter="judge", **fields))
    submitted = api.fleet.requests[0]
    assert submitted.prompt_token_ids[submitted.active_from :][: len(tokens)] == tokens
    assert last_occurrence(submitted.prompt_token_ids, tokens) == submitted.active_from >= min(start, 3)


@pytest.mark.parametrize(("content", "start"), [("he", 3), ("a:a:", 6)])
async def test_the_generation_prompt_of_a_chat_invokes_the_adapter(api: Api, content: str, start: int) -> None:
    """Its last occurrence counts, whatever the messages say."""
    add(api, tuple(ids_of("a", ":")))
    script(api, job_event([5], FinishReason.LENGTH))
    await generate(api, request(adapter="judge", chat={"messages": [{"role": "user", "content": content}]}))
    submitted = api.fleet.requests[0]
    assert submitted.active_from == start == len(submitted.prompt_token_ids) - 2


async def test_generated_tokens_do_not_move_it(api: Api) -> None:
    add(api)
    script(api, job_event([9], FinishReason.LENGTH))
    await generate(api, request(adapter="judge", resume_from=types_pb2.TokenIds(ids=[6, 7])))
    assert api.fleet.requests[0].active_from == 1 and api.fleet.requests[0].generated_token_ids == (6, 7)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": types_pb2.TokenIds(ids=[5, 7, 6])}, "token_ids"),
        ({"text": "hello"}, "text"),
        ({"token_ids": types_pb2.TokenIds(ids=[5]), "resume_from": types_pb2.TokenIds(ids=[6, 7])}, "token_ids"),
    ],
)
async def test_a_prompt_without_the_tokens_is_refused(api: Api, fields: dict[str, Any], field: str) -> None:
    """The base model must not generate in the adapter's place."""
    add(api)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, request(adapter="judge", **fields))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and not api.fleet.requests
    details = caught.value.details() or ""
    assert details.startswith(field) and "lacks the invocation tokens of adapter 'judge', 2 in all: 6, 7;" in details


@pytest.mark.parametrize("uses", [[("judge", 0.5)], [("judge", 1.0), ("poet", 1.0)]])
async def test_scales_and_combinations_are_refused(api: Api, uses: list[tuple[str, float]]) -> None:
    add(api)
    api.registry.records["poet"] = adapter_record("poet", [adapter_version("c" * 64)], "c" * 64)
    named = [generation_pb2.AdapterUse(name=name, scale=scale) for name, scale in uses]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, request(adapters=named))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and not api.fleet.requests
    assert "acts from its invocation tokens on (aLoRA)" in (caught.value.details() or "")
