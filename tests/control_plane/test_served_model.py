"""GetModel, Tokenize and Detokenize through a real control plane, its SDK and its commands."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from motet import AsyncClient, FailedPrecondition, InvalidArgument, NotFound
from motet.cli.main import main

from control_plane.api.generation.preconditions import prompt_sha256
from control_plane.api.model.service import read_recommended
from control_plane.registry.companions.documents import NO_DEFAULTS
from tests.control_plane.api.tokenizers import byte_level_tokenizer
from tests.control_plane.server_processes import adapter_files, checkpoint, control_plane, generate, hash_worker, upload
from tests.control_plane.test_served_companions import TOOL, template, tokenizer_with_tool

BASE = byte_level_tokenizer()
TEXT = "Grüße, world \U0001f642!"
TURNS = [{"role": "user", "content": "hello " + TOOL}]


async def test_the_model_says_what_it_is_and_makes_the_tokens_that_generate_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "chat_template.jinja").write_text(template("0"))
    ours: dict[str, Any] = {"fields": {"content": {"close": "ß"}}}
    theirs: dict[str, Any] = {"fields": {"content": {}}}
    (model / "tokenizer_config.json").write_text(json.dumps({"response_template": ours}))
    recommended = {"temperature": 0.5, "top_p": 0.9, "eos_token_id": 2}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    own = {
        "chat_template.jinja": template("A").encode(),
        "tokenizer.json": tokenizer_with_tool(),
        "tokenizer_config.json": json.dumps({"response_template": theirs}).encode(),
        "generation_config.json": json.dumps({"temperature": 0.25, "max_new_tokens": 3, "eos_token_id": 5}).encode(),
    }
    async with (
        control_plane(tmp_path, "--host-cache", "memory") as (_, clients, workers),
        grpc.aio.insecure_channel(clients) as channel,
        AsyncClient(clients) as client,
        hash_worker(tmp_path, workers),
    ):
        digest = await upload(channel, "a", {**adapter_files(0), **own})
        base, adapter = await client.model.facts(), await client.model.facts("a")
        assert base.max_model_len == 256 and not base.adapter and base.has_tokenizer and base.has_chat_template
        assert base.eos_token_ids == (2,) and base.sampling["temperature"] == 0
        assert base.recommended_sampling == pytest.approx({"temperature": 0.5, "top_p": 0.9})
        assert (adapter.adapter, adapter.adapter_digest) == ("adapters/a", digest)
        assert adapter.sampling["temperature"] == adapter.recommended_sampling["temperature"] == 0.25
        assert (adapter.max_tokens, adapter.eos_token_ids) == (3, (5,))
        assert adapter.fingerprint == base.fingerprint and adapter.vocab_size >= base.vocab_size

        assert json.loads(base.response_template) == ours and json.loads(adapter.response_template) == theirs

        found = await client.model.tokenize(TEXT, return_tokens=True)
        assert list(found.token_ids) == BASE.encode(TEXT).ids and found.model_fingerprint == base.fingerprint
        bare = await client.model.tokenize(TEXT, add_special_tokens=False, return_tokens=True)
        assert list(bare.token_ids) == BASE.encode(TEXT, add_special_tokens=False).ids
        assert b"".join(bare.tokens).decode() == TEXT == await client.model.detokenize(bare.token_ids)
        assert await client.model.detokenize(found.token_ids, skip_special_tokens=True) == TEXT
        long = await client.model.tokenize(TEXT * 2000)
        assert list(long.token_ids) == BASE.encode(TEXT * 2000).ids  # longer than the context

        for name in ("", "a"):
            made = await client.model.tokenize(TURNS, adapter=name, return_tokens=True)
            chat: Any = {"messages": TURNS}
            started = (await generate(channel, adapter=name, chat=chat, text=None))[0].started
            assert prompt_sha256(made.token_ids) == started.prompt_sha256
            assert made.render_time is not None and made.render_time <= datetime.now(UTC)
            assert b"".join(made.tokens).decode() == ("A" if name else "0") + "hello " + TOOL
        own_id = made.token_ids[-1]
        assert await client.model.detokenize([own_id], adapter="a") == TOOL

        def command(*argv: str) -> str:
            assert main(["--server", clients, *argv]) == 0
            return capsys.readouterr().out

        ids = await asyncio.to_thread(command, "tokenize", "--no-special-tokens", TEXT)
        assert [int(part) for part in ids.split()] == list(bare.token_ids)
        assert int(await asyncio.to_thread(command, "tokenize", "--count", TEXT)) == len(found.token_ids)
        assert json.loads(await asyncio.to_thread(command, "tokenize", "--json", "--chat", TEXT))["tokens"]
        assert await asyncio.to_thread(command, "detokenize", ids) == TEXT + "\n"
        assert digest in await asyncio.to_thread(command, "model", "--adapter", "a")
        assert json.loads(await asyncio.to_thread(command, "model", "--json"))["dtype"] == base.dtype

        with pytest.raises(NotFound):
            await client.model.facts("nobody")
        with pytest.raises(InvalidArgument, match="1048576"):
            await client.model.tokenize("x" * (1 << 20) + "y")
        with pytest.raises(InvalidArgument, match="vocabulary size"):
            await client.model.detokenize([base.vocab_size])


async def test_without_a_tokenizer_facts_are_served_and_texts_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    async with (
        control_plane(tmp_path, "--host-cache", "memory") as (_, clients, _workers),
        AsyncClient(clients) as client,
    ):
        found = await client.model.facts()
        assert not (found.has_tokenizer or found.special_tokens)
        for call in (client.model.tokenize("x"), client.model.detokenize([1])):
            with pytest.raises(FailedPrecondition, match="tokenizer"):
                await call


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": -1}', '{"eos_token_id": 10000}'])
def test_a_broken_generation_config_recommends_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    assert read_recommended(tmp_path, 300) == NO_DEFAULTS
    assert read_recommended(tmp_path / "nowhere", 300) == NO_DEFAULTS
