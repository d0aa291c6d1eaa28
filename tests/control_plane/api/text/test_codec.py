"""Texts that the tokenizer fails on are the caller's to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from control_plane.api.text.chat_template import ChatTemplate
from control_plane.api.text.codec import MAX_INLINE_CHARS, TextCodec
from control_plane.errors import InvalidRequest
from tests.control_plane.api.fakes import byte_level_tokenizer


class Panic(BaseException):
    """As the Rust library's: no Exception."""


class PanickingTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        raise Panic(f"index out of bounds in {text[:10]}")


@pytest.fixture
def codec() -> Iterator[TextCodec]:
    codec = TextCodec(byte_level_tokenizer(), ChatTemplate("{{ messages[0].content }}", {}))
    yield codec
    codec.close()


@pytest.mark.parametrize("num_chars", [3, MAX_INLINE_CHARS + 1], ids=["inline", "in a thread"])
async def test_panic_of_the_tokenizer_names_the_field(codec: TextCodec, num_chars: int) -> None:
    broken: Any = PanickingTokenizer()
    codec._tokenizer = broken
    for field, encoding in (
        ("text", codec.encode_text("a" * num_chars)),
        ("chat", codec.encode_chat([{"role": "user", "content": "a" * num_chars}])),
    ):
        with pytest.raises(InvalidRequest, match="tokenizer cannot encode it; send token_ids") as caught:
            await encoding
        assert [violation.field for violation in caught.value.violations] == [field]


async def test_text_that_is_no_unicode_names_the_field(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequest, match=r"^text: ") as caught:
        await codec.encode_text("\ud800")
    assert caught.value.violations[0].field == "text"
