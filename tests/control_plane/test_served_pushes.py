"""What a pushed version has beside its weights, through real processes: what the version before it has, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from motet import AsyncClient, InvalidArgument, NotFound
from safetensors.numpy import load, save

from control_plane.api.generation.preconditions import prompt_sha256
from tests.control_plane.server_processes import (
    HIDDEN,
    VOCAB,
    adapter_files,
    checkpoint,
    control_plane,
    generate,
    hash_worker,
    upload,
)
from tests.control_plane.test_served_companions import BASE, CHAT, NEXT_ID, TOOL, template, tokenizer_with_tool

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DEFAULTS = {"temperature": 0.5, "max_new_tokens": 3}


def own_files() -> dict[str, bytes]:
    return {
        "chat_template.jinja": template("A").encode(),
        "tokenizer.json": tokenizer_with_tool(),
        "generation_config.json": json.dumps(DEFAULTS).encode(),
    }


async def test_a_push_keeps_the_files_of_the_version_that_it_names_or_replaces(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "chat_template.jinja").write_text(template("0"))
    with_tool = prompt_sha256([*BASE.encode("Ahello ", add_special_tokens=False).ids, NEXT_ID])
    plain = prompt_sha256(BASE.encode(f"0hello {TOOL}", add_special_tokens=False).ids)

    async with (
        control_plane(tmp_path, "--host-cache", "memory") as (_, clients, workers),
        grpc.aio.insecure_channel(clients) as channel,
        hash_worker(tmp_path, workers),
        AsyncClient(clients) as client,
    ):

        async def push(seed: int, name: str = "policy", **options: Any) -> Any:
            files = adapter_files(seed)
            return await client.adapters.push(name, files[CONFIG], files[WEIGHTS], **options)

        async def used() -> tuple[str, float, int]:
            """Prompt, temperature and token limit of a request for the active version."""
            stream = await generate(
                channel, adapter="policy", chat=CHAT, text=None, stopping={"ignore_eos": True}, sampling={}
            )
            started = stream[0].started
            return started.prompt_sha256, started.sampling.temperature, started.stopping.max_tokens

        first = await upload(channel, "policy", {**adapter_files(0), **own_files()})
        theirs = await used()
        assert theirs == (with_tool, 0.5, 3)

        for seed in (1, 2):  # as a training loop does: weights alone, step by step
            pushed = await push(seed)
            assert pushed.adapter.active_version.files == ("chat_template", "generation_config", "tokenizer")
            assert await used() == theirs
        assert pushed.files_from not in ("", first), "the version of the push before"
        # The version is what an upload of all files is.
        assert (
            await upload(channel, "policy", {**adapter_files(2), **own_files()}) == pushed.adapter.active_version.digest
        )

        cleared = await push(3, without_files=True)
        assert (cleared.files_from, cleared.adapter.active_version.files) == ("", ())
        assert (await used())[0] == plain
        assert (await push(4)).adapter.active_version.files == (), "the version before it has none"
        for seed, named in ((5, 1), (6, "1"), (7, first)):
            pushed = await push(seed, files_from=named)
            assert pushed.files_from == first
            assert await used() == theirs
            await push(8, without_files=True)
        held = await push(9, files_from=first, hold=True)
        assert held.files_from == first and (await used())[0] == plain
        checked = await push(10, files_from=first, validate_only=True)
        assert checked.files_from == first

        with pytest.raises(InvalidArgument, match=r"header\.without_files"):
            await push(13, files_from=1, without_files=True)
        with pytest.raises(NotFound, match="999"):
            await push(13, files_from=999)
        with pytest.raises(NotFound, match=r"'new' has no version '1'"):
            await push(13, "new", files_from=1)
        assert (await used())[0] == plain


async def test_files_that_name_tokens_which_the_pushed_weights_lack_are_refused(tmp_path: Path) -> None:
    """The parent has rows of its own for new tokens, and the push has none."""
    checkpoint(tmp_path / "model")
    files = adapter_files(0)
    rows = np.random.default_rng(3).standard_normal((VOCAB + 1, HIDDEN)).astype(np.float32)
    tensors = {
        **load(files[WEIGHTS]),
        "base_model.model.model.embed_tokens.weight": rows,
        "base_model.model.lm_head.weight": rows[::-1].copy(),
    }
    grown = {**files, WEIGHTS: save(tensors)}
    async with (
        control_plane(tmp_path, "--host-cache", "memory") as (_, clients, workers),
        grpc.aio.insecure_channel(clients) as channel,
        hash_worker(tmp_path, workers),
        AsyncClient(clients) as client,
    ):
        first = await upload(channel, "grown", {**grown, "chat_template.jinja": template("B").encode()})
        template_alone = await client.adapters.push("grown", files[CONFIG], files[WEIGHTS])
        assert template_alone.files_from == first, "a template names no ids"
        await upload(
            channel, "grown", {**grown, "generation_config.json": json.dumps({"eos_token_id": VOCAB}).encode()}
        )
        with pytest.raises(
            InvalidArgument, match=rf"generation_config.*{VOCAB + 1} tokens.*have {VOCAB};.*without_files"
        ):
            await client.adapters.push("grown", files[CONFIG], files[WEIGHTS])
        kept = await client.adapters.push("grown", grown[CONFIG], grown[WEIGHTS])
        assert kept.adapter.active_version is not None
        assert kept.adapter.active_version.files == ("generation_config",)
        assert (await client.adapters.push("grown", files[CONFIG], files[WEIGHTS], without_files=True)).files_from == ""
