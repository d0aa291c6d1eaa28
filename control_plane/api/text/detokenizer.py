"""Token ids to text, one token at a time.

The pieces that a Detokenizer returns, joined, equal `tokenizer.decode(all ids, skip_special_tokens=True)`, and no
piece splits a code point. The text after k tokens depends on those k tokens alone, not on how they were chunked.
The cost per token does not grow with the number of tokens.
"""

from __future__ import annotations

import codecs
import json
from typing import Protocol

from tokenizers import Tokenizer

_ENOUGH_TOKENS = 8  # more than an unfinished code point can span


class Detokenizer(Protocol):
    """Text of one sequence."""

    def push(self, token_id: int) -> str:
        """The text that this token makes final; may be empty."""
        ...

    def finish(self) -> str:
        """The text still held back; nothing may be pushed after it."""
        ...


class DetokenizerFactory:
    """Makes detokenisers for one tokenizer; keeps what they share."""

    def __init__(self, tokenizer: Tokenizer, *, keeps_special: bool = False) -> None:
        """`keeps_special`: texts hold special tokens, as with `skip_special_tokens=False`."""
        self._tokenizer = tokenizer
        self._keeps_special = keeps_special
        self._keeping: DetokenizerFactory | None = None
        kinds = _decoder_kinds(tokenizer)
        # Cases: 1. byte-level alone: bytes can be mapped token by token. 2. byte fallback: runs of <0xHH> tokens are
        # decoded as a whole, so a run is held until it ends. 3. a decoder chain with byte-level in it: the last tokens
        # may end within a code point. 4. others work on whole characters.
        self._is_byte_level = kinds == ["ByteLevel"]
        self._has_byte_fallback = "ByteFallback" in kinds
        self.splits_code_points = "ByteLevel" in kinds
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._byte_token_ids = frozenset(
            token_id
            for value in range(256)
            if self._has_byte_fallback and (token_id := tokenizer.token_to_id(f"<0x{value:02X}>")) is not None
        )
        self._bytes_by_id: dict[int, bytes] = {}
        self._spelled_by_id: dict[int, bytes] = {}
        self._anchor = None if self.splits_code_points else self._find_anchor()

    def keeping_special(self) -> DetokenizerFactory:
        """A factory whose texts keep special tokens; made once."""
        if self._keeping is None:
            self._keeping = DetokenizerFactory(self._tokenizer, keeps_special=True)
        return self._keeping

    def make(self) -> Detokenizer:
        """A detokeniser at the start of a sequence."""
        return _ByteLevelDetokenizer(self) if self._is_byte_level else _WindowDetokenizer(self)

    def is_skipped(self, token_id: int) -> bool:
        """Whether decode() leaves this id out: special, or not in the vocabulary."""
        if token_id in self._special_ids and not self._keeps_special:
            return True
        return self._tokenizer.id_to_token(token_id) is None

    def is_byte_token(self, token_id: int) -> bool:
        return token_id in self._byte_token_ids

    def decode(self, token_ids: list[int]) -> str:
        return self.decode_all(token_ids, not self._keeps_special)

    def decode_all(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """The text of whole token ids."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def special_tokens(self) -> dict[int, str]:
        """Special tokens by id."""
        tokens = self._tokenizer.get_added_tokens_decoder()
        return {token_id: tokens[token_id].content for token_id in sorted(self._special_ids)}

    def spelled(self, token_id: int) -> bytes:
        """The bytes that a token adds within a text; of a special token, how it is written. Empty for an unknown id."""
        known = self._spelled_by_id.get(token_id)
        if known is None:
            known = self._spelled_by_id[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return str(token).encode()
        if token_id in self._byte_token_ids:
            return bytes([int(token[3:5], 16)])
        if self.splits_code_points:
            return self.bytes_of(token_id)
        if self._anchor is None:
            return self.decode([token_id]).encode()
        # Alone, a decoder would take a token for the first one and strip its space.
        before = self.decode([self._anchor])
        return self.decode([self._anchor, token_id]).removeprefix(before).encode()

    def _find_anchor(self) -> int | None:
        """A token with a text of its own that stays as it is, whatever follows."""
        for token_id in range(min(self._tokenizer.get_vocab_size(), 2048)):
            if token_id not in self._special_ids and token_id not in self._byte_token_ids:
                text = self.decode([token_id])
                if text.isalnum() and self.decode([token_id, token_id]).startswith(text):
                    return token_id
        return None

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one token of a byte-level vocabulary; empty for one that decode() leaves out."""
        known = self._bytes_by_id.get(token_id)
        if known is None:
            token = "" if self.is_skipped(token_id) else str(self._tokenizer.id_to_token(token_id))
            known = self._bytes_by_id[token_id] = _byte_level_bytes(token)
        return known


class _ByteLevelDetokenizer:
    """Detokenises byte-level BPE: tokens are byte strings, text is their UTF-8 with U+FFFD for what is malformed."""

    def __init__(self, factory: DetokenizerFactory) -> None:
        self._bytes_of = factory.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """For every other decoder: the text of a short window with the new tokens, less that without them.

    The window starts at tokens whose text was emitted, so that what a decoder does to the first token of a
    sequence (a stripped space) happens to both texts alike. It may start within a code point: UTF-8 is right again
    from the next one on.
    """

    def __init__(self, factory: DetokenizerFactory) -> None:
        self._factory = factory
        self._context: list[int] = []  # empty, or ids whose text is not empty
        self._num_emitted = 0  # characters of the context's text that were emitted: all but an unfinished code point
        self._pending: list[int] = []  # ids after the context, no text of which was emitted yet
        # Follows the bytes of all ids where these may end within a code point: what it holds is the unfinished one.
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if factory.splits_code_points else None

    def push(self, token_id: int) -> str:
        if self._factory.is_skipped(token_id):
            return ""
        if self._factory.is_byte_token(token_id):
            self._pending.append(token_id)
            return ""
        text = ""
        if self._pending and self._factory.is_byte_token(self._pending[-1]):  # the run of byte tokens ends here
            text = self._emit()
        self._pending.append(token_id)
        if self._bytes is None:
            return text + self._emit()
        self._bytes.decode(self._factory.bytes_of(token_id))
        # An unfinished code point becomes one U+FFFD, at the end.
        return text + self._emit(num_unfinished=1 if self._bytes.getstate()[0] else 0)

    def finish(self) -> str:
        return self._emit()

    def _emit(self, num_unfinished: int = 0) -> str:
        """`num_unfinished`: characters at the end that more tokens may change."""
        whole = self._factory.decode(self._context + self._pending)
        num_certain = len(whole) - num_unfinished
        new = whole[self._num_emitted : num_certain]
        if new:
            window = self._context + self._pending
            # The pending tokens alone are context enough if they have a text of their own; else the last few are.
            for context in (self._pending, window[-_ENOUGH_TOKENS:]):
                num_emitted = len(self._factory.decode(context)) - num_unfinished
                if num_emitted > 0:
                    break
            else:
                context, num_emitted = window, num_certain
            self._context, self._num_emitted, self._pending = context, num_emitted, []
        elif self._context and not num_unfinished:
            self._pending = []  # tokens without text change nothing after them
        return new


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """Names of the decoders in the chain, in order."""
    decoder = json.loads(tokenizer.to_str()).get("decoder")

    def walk(node: dict[str, object] | None) -> list[str]:
        if node is None:
            return []
        if node["type"] == "Sequence":
            parts = node["decoders"]
            assert isinstance(parts, list)
            return [kind for part in parts for kind in walk(part)]
        return [str(node["type"])]

    return walk(decoder)


def _byte_by_char() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: printable Latin-1 bytes stand for themselves, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(rest)}


BYTE_BY_CHAR = _byte_by_char()


def _byte_level_bytes(token: str) -> bytes:
    # As the library does: a token with any other character (an added one) stands for its own UTF-8.
    if all(char in BYTE_BY_CHAR for char in token):
        return bytes(BYTE_BY_CHAR[char] for char in token)
    return token.encode()
