"""Requests that combine adapters: what is submitted, what is reported, and which versions are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from motet.v1 import generation_pb2

from control_plane.scheduler.types import AdapterUse, Combination, Composition, FinishReason
from tests.control_plane.api.fake_adapters import DIGEST, OTHER_DIGEST, adapter_record, adapter_version
from tests.control_plane.api.fakes import Api, job_event
from tests.control_plane.api.generation.calls import generate, request, script


def add(api: Api, name: str, digest: str, **changes: Any) -> None:
    version = replace(adapter_version(digest), **changes)
    api.registry.records[name] = adapter_record(name, [version], digest)


def combined(*uses: tuple[str, float], **fields: Any) -> generation_pb2.GenerateRequest:
    named = [generation_pb2.AdapterUse(name=name, scale=scale) for name, scale in uses]
    return request(adapters=named, **fields)


async def test_all_adapters_are_submitted_and_reported(api: Api) -> None:
    add(api, "poet", DIGEST)
    add(api, "clerk", OTHER_DIGEST, min_rank=4, max_rank=16)
    script(api, job_event([5], FinishReason.LENGTH))
    responses = await generate(api, combined(("poet", 0.5), ("adapters/clerk", -2.0)))
    submitted = api.fleet.requests[0]
    refs = [each.versions[0].arena_bytes for each in api.registry.records.values()]
    assert submitted.composition is not None and submitted.composition.combination is Combination.CAT
    assert [(use.ref.digest, use.scale) for use in submitted.composition.uses] == [(DIGEST, 0.5), (OTHER_DIGEST, -2.0)]
    assert [ref.arena_bytes for ref in submitted.adapters] == refs
    assert submitted.adapter == submitted.composition.uses[0].ref, "a combination looks like the base model"
    started = responses[0].started
    assert (started.adapter, started.adapter_digest) == ("", "")
    assert [(use.name, use.digest, use.scale) for use in started.adapters] == [
        ("adapters/poet", DIGEST, 0.5),
        ("adapters/clerk", OTHER_DIGEST, -2.0),
    ]


async def test_one_adapter_with_a_scale_of_one_is_a_plain_request(api: Api) -> None:
    add(api, "poet", DIGEST, parts=("a", "b", "magnitude"))
    script(api, job_event([5], FinishReason.LENGTH))
    responses = await generate(api, combined(("poet", 1.0)))
    assert api.fleet.requests[0].composition is None and api.fleet.requests[0].adapter is not None
    assert responses[0].started.adapter == "adapters/poet" and responses[0].started.adapter_digest == DIGEST


async def test_one_adapter_is_scaled(api: Api) -> None:
    add(api, "poet", DIGEST, parts=("a", "b", "bias"))
    script(api, job_event([5], FinishReason.LENGTH))
    await generate(api, combined(("poet", 0.0)))
    submitted = api.fleet.requests[0]
    assert submitted.adapter is not None
    assert submitted.composition == Composition((AdapterUse(submitted.adapter, 0.0),))


@pytest.mark.parametrize(
    ("changes", "message", "reason"),
    [
        (
            {"parts": ("a", "b", "magnitude")},
            combined(("poet", 1.0), ("clerk", 1.0)),
            "DoRA magnitudes, for which PEFT",
        ),
        (
            {"parts": ("a", "b", "bias")},
            combined(("poet", 1.0), ("clerk", 1.0)),
            "defines no combination; use it alone",
        ),
        ({"parts": ("a", "b", "experts")}, combined(("poet", 1.0), ("clerk", 1.0)), "has experts"),
        ({"parts": ("a", "b", "base_bias")}, combined(("poet", 0.5)), "trained biases of the base model"),
        ({"parts": ("a", "b", "magnitude")}, combined(("poet", 0.5)), "a scale is not defined"),
        ({"parts": ()}, combined(("poet", 0.5)), "registered before Motet kept"),
        ({"context_length": 4096}, combined(("poet", 1.0), ("clerk", 1.0)), "rotary embedding of its own"),
        ({"max_rank": 16}, combined(("poet", 1.0), ("clerk", 1.0), combination=2), "ranks 8 to 16 and 8; use CAT"),
    ],
)
async def test_versions_that_cannot_be_combined_are_refused_by_name(
    api: Api, changes: dict[str, Any], message: generation_pb2.GenerateRequest, reason: str
) -> None:
    add(api, "poet", DIGEST, **changes)
    add(api, "clerk", OTHER_DIGEST)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, message)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and not api.fleet.requests
    assert reason in (caught.value.details() or "")


async def test_a_lora_bias_may_have_a_scale_where_its_adapter_is_alone_and_the_refusal_says_so(api: Api) -> None:
    add(api, "poet", DIGEST, parts=("a", "b", "bias"))
    add(api, "clerk", OTHER_DIGEST)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, combined(("poet", 1.0), ("clerk", 1.0)))
    assert "without a scale" not in (caught.value.details() or "")


async def test_two_names_of_one_version_are_refused(api: Api) -> None:
    add(api, "poet", DIGEST)
    add(api, "twin", DIGEST)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, combined(("poet", 1.0), ("twin", 1.0)))
    assert "name it once, with the sum of the scales" in (caught.value.details() or "")


async def test_the_sum_of_the_scales_is_no_advice_where_square_roots_are_summed(api: Api) -> None:
    """PEFT's linear combination of an adapter with itself has 4 times the product at scales of 1, not twice."""
    add(api, "poet", DIGEST)
    add(api, "twin", DIGEST)
    for second in ("twin", "poet"):
        uses = combined(("poet", 1.0), (second, 1.0), combination=generation_pb2.COMBINATION_LINEAR)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, uses)
        details = caught.value.details() or ""
        assert "name it once" in details and "sum of the scales" not in details


async def test_an_adapter_that_does_not_exist_fails_the_whole_combination(api: Api) -> None:
    """The base model, or the other adapter alone, must not generate in its place."""
    add(api, "poet", DIGEST)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, combined(("poet", 1.0), ("clerk", 1.0)))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND and not api.fleet.requests
