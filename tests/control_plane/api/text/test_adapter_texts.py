"""Texts of adapters: each version's own, loaded once, kept for a few, ended with their last user."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.api.text.adapter_texts import AdapterText, AdapterTexts, check_template
from control_plane.api.text.chat_renderer import ChatRenderer, RenderLimits
from control_plane.api.text.codec import TextCodec
from control_plane.api.text.conversation import Conversation
from control_plane.errors import InvalidAdapter, StoreUnavailable
from control_plane.registry.companions.documents import (
    CHAT,
    GENERATION,
    TOKENIZER,
    GenerationDefaults,
    encode,
    encode_defaults,
)
from control_plane.registry.records import ResolvedAdapter
from tests.control_plane.api.fake_adapters import adapter_version
from tests.control_plane.api.tokenizers import byte_level_tokenizer

A, B, C = "a" * 64, "b" * 64, "c" * 64
MESSAGES = [{"role": "user", "content": "he<tool>"}]


def template(mark: str) -> str:
    return mark + "{% for m in messages %}{{ m.content }}{% endfor %}"


def resolved(digest: str, *files: str) -> ResolvedAdapter:
    version = replace(adapter_version(digest), files=files)
    return ResolvedAdapter("x", version, version.ref)


class Rig:
    """A base codec, and what the store has."""

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        base = byte_level_tokenizer()
        file.write_text(base.to_str())
        self.codec = TextCodec(base, ChatRenderer(template("0"), {}), tokenizer_file=file)
        self.next_id = base.get_vocab_size()
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokens = [*json.loads(base.to_str())["added_tokens"], {"id": self.next_id, "content": "<tool>", **flags}]
        self.stored = {
            A: {
                CHAT: encode({"template": template("A"), "special_tokens": {}}),
                TOKENIZER: encode({"added_tokens": tokens}),
            },
            B: {CHAT: encode({"template": template("B"), "special_tokens": {}})},
            C: {GENERATION: encode_defaults(GenerationDefaults({"temperature": 0.5}, 3, (7,)))},
        }
        self.reads: list[str] = []
        self.error: Exception | None = None
        self.texts = AdapterTexts(self.codec, self.read, max_kept=2)

    async def read(self, digest: str) -> dict[str, bytes]:
        self.reads.append(digest)
        if self.error is not None:
            raise self.error
        return self.stored[digest]

    async def text(self, digest: str) -> AdapterText:
        return (await self.texts.of(lambda: resolved(digest, *self.stored[digest])))[1]

    def decoded(self, codec: TextCodec, ids: list[int]) -> str:
        detokenizer = codec.detokenizer()
        assert detokenizer is not None
        return "".join(detokenizer.push(each) for each in ids) + detokenizer.finish()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    await made.texts.close()
    await made.codec.close()


async def test_each_version_and_the_base_model_render_with_their_own_template_at_once(rig: Rig) -> None:
    first, second = await rig.text(A), await rig.text(B)
    base = (await rig.texts.of(lambda: None))[1]
    codecs = [first.codec, second.codec, base.codec] * 4
    prompts = await asyncio.gather(*(codec.encode_chat(Conversation(MESSAGES)) for codec in codecs))

    shown = [rig.decoded(codec, ids) for codec, ids in zip(codecs, prompts, strict=True)]
    assert shown == ["Ahe<tool>", "Bhe<tool>", "0he<tool>"] * 4
    assert [rig.next_id in ids for ids in prompts] == [True, False, False] * 4


async def test_a_text_is_read_once_for_requests_at_the_same_time(rig: Rig) -> None:
    texts = await asyncio.gather(*(rig.text(C) for _ in range(5)))
    assert rig.reads == [C]
    assert texts[0].defaults == GenerationDefaults({"temperature": 0.5}, 3, (7,))


async def test_a_version_without_files_reads_nothing(rig: Rig) -> None:
    found, text = await rig.texts.of(lambda: resolved(A))
    assert found is not None
    assert (text.codec, rig.reads) == (rig.codec, [])


async def test_a_failed_read_is_tried_again(rig: Rig) -> None:
    rig.error = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        await rig.text(A)
    rig.error = None
    assert (await rig.text(A)).codec is not rig.codec


async def test_the_version_that_a_request_gets_may_change_while_its_text_is_loaded(rig: Rig) -> None:
    versions = iter([resolved(A, CHAT), resolved(B, CHAT), resolved(B, CHAT), resolved(B, CHAT)])
    found, text = await rig.texts.of(lambda: next(versions))
    assert found is not None
    assert found.ref.digest == B
    assert rig.decoded(text.codec, await text.codec.encode_chat(Conversation(MESSAGES))) == "Bhe<tool>"


async def test_a_template_that_is_not_kept_ends_with_its_last_user(rig: Rig) -> None:
    first = await rig.text(A)
    await rig.text(B)
    await rig.text(C)
    assert (rig.texts.num_kept, rig.texts.num_renderers) == (2, 2)
    assert rig.decoded(first.codec, await first.codec.encode_chat(Conversation(MESSAGES))) == "Ahe<tool>"
    del first
    gc.collect()
    await asyncio.sleep(0)
    assert rig.texts.num_renderers == 1


async def test_templates_that_cannot_be_used_are_refused() -> None:
    await check_template("{{ raise_exception('no users here') }}", {})
    with pytest.raises(InvalidAdapter, match="does not compile"):
        await check_template("{% for %}", {})
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidAdapter, match="took more than"):
        await check_template(endless, {}, RenderLimits(cpu_limit_s=0.2))
