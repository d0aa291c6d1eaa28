"""Templates, added tokens and defaults of adapters through real processes: each adapter's for its own requests only."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from motet.v1 import types_pb2

from control_plane.api.generation.preconditions import prompt_sha256
from tests.control_plane.api.tokenizers import byte_level_tokenizer
from tests.control_plane.server_processes import (
    VOCAB,
    adapter_files,
    checkpoint,
    control_plane,
    generate,
    hash_worker,
    upload,
)

BASE = byte_level_tokenizer()
NEXT_ID = BASE.get_vocab_size()
TOOL = "<tool>"
CHAT: Any = {"messages": [{"role": "user", "content": "hello " + TOOL}]}


def template(mark: str) -> str:
    return "{% for m in messages %}" + mark + "{{ m.content }}{% endfor %}"


def tokenizer_with_tool() -> bytes:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([TOOL])
    return tokenizer.to_str(pretty=True).encode()


async def test_each_adapter_has_its_own_template_tokens_and_defaults(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "chat_template.jinja").write_text(template("0"))
    defaults = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 3, "eos_token_id": 2}
    own: dict[str, dict[str, bytes]] = {
        "a": {"chat_template.jinja": template("A").encode(), "tokenizer.json": tokenizer_with_tool()},
        "b": {"tokenizer_config.json": json.dumps({"chat_template": template("B")}).encode()},
        "c": {"generation_config.json": json.dumps(defaults).encode()},
        "d": {"chat_template.jinja": template("0").encode(), "tokenizer.json": BASE.to_str(pretty=True).encode()},
    }
    marks = {"a": "A", "b": "B", "c": "0", "d": "0", "": "0"}
    expected = {
        name: prompt_sha256(
            [*BASE.encode("Ahello ", add_special_tokens=False).ids, NEXT_ID]
            if name == "a"
            else BASE.encode(f"{mark}hello {TOOL}", add_special_tokens=False).ids
        )
        for name, mark in marks.items()
    }

    async def prompts(channel: grpc.aio.Channel) -> dict[str, str]:
        names = list(marks) * 3
        streams = await asyncio.gather(*(generate(channel, adapter=name, chat=CHAT, text=None) for name in names))
        found: dict[str, set[str]] = {name: set() for name in marks}
        for name, responses in zip(names, streams, strict=True):
            found[name].add(responses[0].started.prompt_sha256)
        return {name: "/".join(hashes) for name, hashes in found.items()}

    async with (
        control_plane(tmp_path, "--host-cache", "memory") as (_, clients, workers),
        grpc.aio.insecure_channel(clients) as channel,
        hash_worker(tmp_path, workers),
    ):
        digests = {name: await upload(channel, name, {**adapter_files(0), **files}) for name, files in own.items()}
        plain = await upload(channel, "plain", adapter_files(0))
        assert digests["d"] == plain
        assert len(set(digests.values())) == 4
        assert await prompts(channel) == expected

        first = (await generate(channel, adapter="c", stopping={"ignore_eos": True}))[0].started
        assert (first.sampling.temperature, round(first.sampling.top_p, 6)) == (0.5, 0.9)
        assert first.stopping.max_tokens == 3
        set_by_client = await generate(
            channel, adapter="c", sampling={"temperature": 0}, stopping={"max_tokens": 2, "ignore_eos": True}
        )
        assert set_by_client[0].started.sampling.temperature == 0
        assert set_by_client[0].started.stopping.max_tokens == 2
        other = (await generate(channel, adapter="a"))[0].started
        assert (other.sampling.temperature, other.sampling.top_p) == (0, 1)

        # Adapters that act together: the base model's, whatever each of them brings.
        for pair in ("ab", "ac", "bc"):
            uses = [{"name": name, "scale": 0.5} for name in pair]
            combined = (await generate(channel, adapters=uses, chat=CHAT, text=None))[0].started
            assert combined.prompt_sha256 == expected[""]
            assert (combined.sampling.temperature, combined.sampling.top_p) == (0, 1)
        scaled = (await generate(channel, adapters=[{"name": "a", "scale": 0.5}], chat=CHAT, text=None))[0].started
        assert scaled.prompt_sha256 == expected["a"]

        # The text of an added token: the stop string is found in the adapter's own text, and in no other's.
        ended = {
            name: (
                await generate(
                    channel,
                    adapter=name,
                    resume_from={"ids": [NEXT_ID]},
                    stopping={"max_tokens": 4, "stop": [TOOL], "ignore_eos": True},
                )
            )[-1].finished
            for name in ("a", "b", "")
        }
        assert ended["a"].stop_string == TOOL
        assert [ended[name].reason for name in ("b", "")] == [types_pb2.FINISH_REASON_LENGTH] * 2

    async with (
        control_plane(tmp_path, "--host-cache", "memory") as (_, clients, workers),
        grpc.aio.insecure_channel(clients) as channel,
        hash_worker(tmp_path, workers),
    ):
        assert await prompts(channel) == expected


async def test_an_adapters_end_tokens_end_its_own_requests_only(tmp_path: Path) -> None:
    """Two adapters that end at other halves of the vocabulary, beside the base model and a combination of the two."""
    checkpoint(tmp_path / "model")

    def files(first: int, weights: int) -> dict[str, bytes]:
        ends = [token for token in range(VOCAB) if token % 2 == first]
        return {**adapter_files(weights), "generation_config.json": json.dumps({"eos_token_id": ends}).encode()}

    async with (
        control_plane(tmp_path, "--host-cache", "memory") as (_, clients, workers),
        grpc.aio.insecure_channel(clients) as channel,
        hash_worker(tmp_path, workers),
    ):
        for name, first in (("even", 0), ("odd", 1)):
            await upload(channel, name, files(first, first))
        both = [{"name": "even", "scale": 0.5}, {"name": "odd", "scale": 0.5}]
        uses: list[dict[str, Any]] = [{"adapter": "even"}, {"adapter": "odd"}, {"adapter": ""}, {"adapters": both}]
        calls = [dict(use, text=f"{place} hello") for place in range(8) for use in uses]
        streams = await asyncio.gather(
            *(generate(channel, **{"stopping": {"max_tokens": 12}, "adapter": "", **call}) for call in calls)
        )
    num_mixed = 0
    for call, responses in zip(calls, streams, strict=True):
        tokens = [token for response in responses for token in response.delta.token_ids]
        halves = [token % 2 for token in tokens]
        if call.get("adapter") in ("even", "odd"):
            first = ["even", "odd"].index(call["adapter"])
            is_ended = responses[-1].finished.reason != types_pb2.FINISH_REASON_LENGTH
            assert halves.count(first) == is_ended and (not is_ended or halves[-1] == first), call
            assert is_ended or len(tokens) == 12
        else:
            num_mixed += len(set(halves)) == 2
    assert num_mixed >= 12, "the base model and combinations end at tokens of an adapter"
