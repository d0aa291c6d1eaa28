"""The least number of tokens that a text can have, from its length alone.

A text far beyond the context is refused by it before it is encoded. The bound never exceeds the true number: where a
tokenizer may drop text, or make one token of any amount of it, there is no bound.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from control_plane.errors import ContextTooLong, FieldViolation

# Canonical composition makes one character of at most this many (U+1F82 is a letter and three marks).
_MAX_COMPOSED_CHARS = 4
_BYTES = [f"<0x{value:02X}>" for value in range(256)]
_KEEPING_NORMALIZERS = {"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
_WHITESPACE_PRE_TOKENIZERS = {"Whitespace", "WhitespaceSplit"}


@dataclass(frozen=True, slots=True)
class LengthBound:
    """What is known of one tokenizer."""

    max_token_chars: float  # characters of the text that one token stands for, at most
    ignores_whitespace: bool = False  # any amount of whitespace may have no token of its own

    def least_num_tokens(self, text: str) -> int:
        """Tokens that the text has at least."""
        num_chars = len("".join(text.split())) if self.ignores_whitespace else len(text)
        return int(num_chars / self.max_token_chars)


def length_bound(tokenizer: Tokenizer) -> LengthBound | None:
    """The bound for a tokenizer; None where there is none."""
    described = json.loads(tokenizer.to_str())
    normalizers = _parts(described["normalizer"], "normalizers")
    splitters = _parts(described["pre_tokenizer"], "pretokenizers")
    if not _covers_every_char(described["model"], [*normalizers, *splitters]):
        return None
    shrinkage, ignores_whitespace = 1.0, False
    for part in normalizers:
        factor = _shrinkage(part)
        if factor is None:
            return None
        shrinkage *= factor
        ignores_whitespace |= part["type"] == "Strip"
    for part in splitters:
        if part["type"] in _WHITESPACE_PRE_TOKENIZERS:
            ignores_whitespace = True
        elif part["type"] not in _KEEPING_PRE_TOKENIZERS and part.get("behavior", "Removed") == "Removed":
            return None
    longest = max(map(len, described["model"]["vocab"]), default=0)
    if described["model"]["type"] == "Unigram":
        longest = max((len(piece) for piece, _ in described["model"]["vocab"]), default=0)
    for token in described["added_tokens"]:
        ignores_whitespace |= token["lstrip"] or token["rstrip"]
        content = token["content"]
        if token["normalized"] and tokenizer.normalizer is not None:
            content = max(content, tokenizer.normalizer.normalize_str(content), key=len)
        longest = max(longest, len(content))
    return LengthBound(longest * shrinkage, ignores_whitespace) if longest else None


def _parts(component: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, in order, sequences taken apart."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [part for child in component[key] for part in _parts(child, key)]
    return [component]


def _covers_every_char(model: dict[str, Any], steps: list[dict[str, Any]]) -> bool:
    """Whether no run of characters is dropped, or becomes a single unknown token, for want of a token."""
    vocab = model.get("vocab", ())
    if model["type"] == "Unigram":
        pieces = {piece for piece, _ in vocab}
        return bool(model.get("byte_fallback")) and pieces.issuperset(_BYTES)
    if model["type"] != "BPE":
        return False  # a word of any length that is not known is one token
    if model.get("byte_fallback") and all(token in vocab for token in _BYTES):
        return True
    if any(step["type"] == "ByteLevel" for step in steps) and all(
        char in vocab for char in pre_tokenizers.ByteLevel.alphabet()
    ):
        return True
    return model.get("unk_token") in vocab and not model.get("fuse_unk")


def _shrinkage(normalizer: dict[str, Any]) -> float | None:
    """How many characters it makes one of, at most, whitespace at the ends aside; None where there is no limit."""
    kind = normalizer["type"]
    if kind in _KEEPING_NORMALIZERS or kind == "Strip":
        return 1.0
    if kind in ("NFC", "NFKC"):
        return float(_MAX_COMPOSED_CHARS)
    if kind == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        if pattern and content:
            return max(len(pattern) / len(content), 1.0)
    return None


def prompt_too_long(field: str, num_tokens: str, max_model_len: int) -> ContextTooLong:
    """The error for a prompt that leaves no room for a token. `num_tokens` in words: "5000 tokens"."""
    return ContextTooLong(
        FieldViolation(
            field,
            f"prompt of {num_tokens}; at most {max_model_len - 1}, "
            f"one less than the context of {max_model_len} tokens; shorten the prompt",
        )
    )
