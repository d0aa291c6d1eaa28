"""Texts become the ids that the tokenizer gives, off the event loop, or are refused before they cost anything."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing

from control_plane.api.text.chat_renderer import ChatRenderer
from control_plane.api.text.codec import MAX_INLINE_CHARS, NUM_PLACES, TextCodec
from control_plane.api.text.conversation import Conversation
from control_plane.errors import ContextTooLong, Exhausted, InvalidRequest, TokenizerUnavailable
from tests.control_plane.api.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer


class Panic(BaseException):
    """As the Rust library's: no Exception."""


class PanickingTokenizer:
    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        raise Panic(f"index out of bounds in {texts[0][:10]}")


@pytest.fixture
def encoder() -> Any:
    """What encodes; None: the tokenizer. Tests put another one in its place."""
    return None


@pytest.fixture
async def codec(encoder: Any) -> AsyncIterator[TextCodec]:
    codec = TextCodec(byte_level_tokenizer(), ChatRenderer("{{ messages[0].content }}", {}), encoder=encoder)
    yield codec
    await codec.close()


@pytest.mark.parametrize("encoder", [PanickingTokenizer()], ids=["PanickingTokenizer"])
@pytest.mark.parametrize("num_chars", [3, MAX_INLINE_CHARS + 1], ids=["inline", "in a thread"])
async def test_panic_of_the_tokenizer_names_the_field(
    codec: TextCodec, encoder: PanickingTokenizer, num_chars: int
) -> None:
    for field, encoding in (
        ("text", codec.encode_text("a" * num_chars)),
        ("chat", codec.encode_chat(Conversation([{"role": "user", "content": "a" * num_chars}]))),
    ):
        with pytest.raises(InvalidRequest, match="tokenizer cannot encode it; send token_ids") as caught:
            await encoding
        assert [violation.field for violation in caught.value.violations] == [field]


async def test_text_that_is_no_unicode_names_the_field(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequest, match=r"^text: ") as caught:
        await codec.encode_text("\ud800")
    assert caught.value.violations[0].field == "text"


def with_special_tokens() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    bos, eos = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)])
    return tokenizer


@pytest.mark.parametrize(
    "make", [byte_level_tokenizer, metaspace_tokenizer, byte_fallback_tokenizer, with_special_tokens]
)
@pytest.mark.parametrize("num_repeats", [1, 1500], ids=["inline", "in a thread"])
async def test_ids_are_those_of_encode(make: Callable[[], Tokenizer], num_repeats: int) -> None:
    """The call that releases the interpreter's lock returns the same as the plain one, special tokens included."""
    tokenizer, text = make(), "hello<s> é ñ ñ 😀</s>\x00\n" * num_repeats
    codec = TextCodec(tokenizer, ChatRenderer("{{ messages[0].content }}", {}))
    assert await codec.encode_text(text) == tokenizer.encode(text).ids
    chat = [{"role": "user", "content": text}]
    assert await codec.encode_chat(Conversation(chat)) == tokenizer.encode(text, add_special_tokens=False).ids
    await codec.close()


class Untouched:
    """Stands for a tokenizer that must not be called."""

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        raise AssertionError("a text was encoded that is too long by its length")


@pytest.mark.parametrize("encoder", [Untouched()], ids=["Untouched"])
async def test_text_far_beyond_the_context_is_refused_by_its_length(codec: TextCodec, encoder: Untouched) -> None:
    too_long = "a" * 1_000_000
    for field, encoding in (
        ("text", codec.encode_text(too_long, max_model_len=4096)),
        ("chat", codec.encode_chat(Conversation([{"role": "user", "content": too_long}]), max_model_len=4096)),
    ):
        with pytest.raises(ContextTooLong, match=r"1000000 characters, at least 250000 tokens; at most 4095") as caught:
            await encoding
        assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(("num_chars", "max_model_len"), [(70, 64), (3000, 2000)], ids=["inline", "in a thread"])
async def test_text_of_too_many_tokens_has_their_number(codec: TextCodec, num_chars: int, max_model_len: int) -> None:
    with pytest.raises(
        ContextTooLong, match=rf"^text: prompt of {num_chars} tokens; at most {max_model_len - 1}, one less than the"
    ):
        await codec.encode_text("x" * num_chars, max_model_len=max_model_len)
    assert len(await codec.encode_text("x" * num_chars, max_model_len=num_chars + 1)) == num_chars


async def test_refusal_of_a_long_text_keeps_nothing_of_its_encoding(codec: TextCodec) -> None:
    """The event loop frees what the error's traceback keeps: 45 ms for a text of 1 MB."""
    with pytest.raises(ContextTooLong) as caught:
        await codec.encode_text("x" * 3000, max_model_len=2000)
    kept = [value for entry in caught.traceback for value in entry.frame.f_locals.values()]
    assert any(isinstance(value, str) for value in kept), "the frames are there"
    assert not any(isinstance(value, Encoding) for value in kept)


class GatedTokenizer:
    """Encodes when the test says so; `texts` has what was requested, by first characters."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.texts: list[str] = []

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.texts.append(texts[0][:2])
        assert self.go_on.wait(30)
        return byte_level_tokenizer().encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("encoder", [GatedTokenizer()], ids=["GatedTokenizer"])
async def test_texts_of_one_tenant_do_not_hold_up_those_of_another(codec: TextCodec, encoder: GatedTokenizer) -> None:

    def encode(name: str) -> asyncio.Task[list[int]]:
        return asyncio.create_task(codec.encode_text(name * MAX_INLINE_CHARS, tenant=name[0]))

    flood = [encode(f"a{number}") for number in range(NUM_PLACES + 3)]
    await asyncio.sleep(0)
    other = encode("b0")
    async with asyncio.timeout(30):
        while "b0" not in encoder.texts:
            await asyncio.sleep(0.01)
    assert len(encoder.texts) == NUM_PLACES, "every place but one is the flooding tenant's"
    encoder.go_on.set()
    assert len(await other) == 2 * MAX_INLINE_CHARS
    await asyncio.gather(*flood)


@pytest.mark.parametrize("encoder", [GatedTokenizer()], ids=["GatedTokenizer"])
async def test_more_texts_than_may_wait_are_refused_with_a_time_to_come_back(
    codec: TextCodec, encoder: GatedTokenizer
) -> None:
    text = "a" * 2**20
    waiting = [asyncio.create_task(codec.encode_text(text)) for _ in range(NUM_PLACES + 40)]
    refused = asyncio.as_completed(waiting)
    with pytest.raises(Exhausted, match=r"wait for the tokenizer.*the limit is 67108864.*try again in 1 s") as caught:
        await next(refused)
    assert caught.value.retry_after_s == 1.0
    encoder.go_on.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert 32 <= sum(isinstance(outcome, list) for outcome in outcomes) <= NUM_PLACES + 32


async def test_template_that_does_not_compile_refuses_conversations_alone(tmp_path: Path) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ 9 ** 99999 }}")
    codec = TextCodec.load(tmp_path, tmp_path / "unused.json")
    await codec.start()
    with pytest.raises(TokenizerUnavailable, match="chat template does not compile; send text or token_ids instead"):
        await codec.encode_chat(Conversation([{"role": "user", "content": "x"}]))
    assert await codec.encode_text("he") == [byte_level_tokenizer().token_to_id("he")]
    await codec.close()
