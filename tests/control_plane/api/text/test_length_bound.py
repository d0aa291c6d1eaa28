"""The least number of tokens never exceeds the true one, and is close where texts are long."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from control_plane.api.text.length_bound import LengthBound, length_bound
from tests.control_plane.api.text.test_detokenizer import bare_tokenizer, wordpiece_tokenizer
from tests.control_plane.api.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer

BYTES = [f"<0x{value:02X}>" for value in range(256)]


def long_tokens() -> Tokenizer:
    """Byte-level BPE with runs of spaces and of one letter as tokens, as Llama 3 has them."""
    tokenizer = byte_level_tokenizer()
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    merges = [("h", "e"), ("l", "l")]
    for char in ("Ġ", "a"):
        for length in (2, 4, 8, 16):
            vocab[char * length] = max(vocab.values()) + 1
            merges.append((char * (length // 2), char * (length // 2)))
    tokenizer.model = models.BPE(vocab=vocab, merges=merges)
    return tokenizer


def with_added(**options: bool) -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("he he he he", **options)])
    return tokenizer


def normalized(*steps: normalizers.Normalizer) -> Tokenizer:
    tokenizer = long_tokens()
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def split(step: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.pre_tokenizer = step
    return tokenizer


def unigram(*, byte_fallback: bool) -> Tokenizer:
    pieces = [("<unk>", 0.0), *[(token, -9.0) for token in BYTES], ("▁he", -1.0), ("llo", -1.5), ("aaaa", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def bpe(**options: object) -> Tokenizer:
    vocab = {"<unk>": 0, "a": 1, "b": 2, "aa": 3}
    return Tokenizer(models.BPE(vocab=vocab, merges=[("a", "a")], **options))


def bytes_missing() -> Tokenizer:
    vocab = {token: index for index, token in enumerate([*BYTES[1:], "a"])}
    return Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))


BOUNDED = {
    "byte level": byte_level_tokenizer(),
    "long tokens": long_tokens(),
    "byte fallback": byte_fallback_tokenizer(),
    "added token": with_added(),
    "added token that takes whitespace": with_added(lstrip=True, rstrip=True),
    "added token, normalized": with_added(normalized=True),
    "NFC": normalized(normalizers.NFC()),
    "NFKC, then lowercase": normalized(normalizers.NFKC(), normalizers.Lowercase()),
    "NFD": normalized(normalizers.NFD()),
    "strip": normalized(normalizers.Strip()),
    "replace": normalized(normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Replace("aaa", "b")),
    "byte level as a normalizer": normalized(normalizers.ByteLevel()),
    "whitespace dropped": split(pre_tokenizers.Whitespace()),
    "metaspace": split(pre_tokenizers.Metaspace()),
    "digits and punctuation": split(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Punctuation("isolated")])
    ),
    "a pattern kept": split(pre_tokenizers.Split(Regex(r"\s+"), "merged_with_next")),
    "unigram with byte fallback": unigram(byte_fallback=True),
    "unknown characters one by one": bpe(unk_token="<unk>", fuse_unk=False),
    "few words, unknown characters one by one": metaspace_tokenizer(),
}
UNBOUNDED = {
    "words": bare_tokenizer(),
    "word pieces": wordpiece_tokenizer(),
    "unknown characters fused": bpe(unk_token="<unk>", fuse_unk=True),
    "unknown characters dropped": bpe(),
    "a byte missing": bytes_missing(),
    "unigram": unigram(byte_fallback=False),
    "accents stripped": normalized(normalizers.NFD(), normalizers.StripAccents()),
    "control characters dropped": normalized(normalizers.BertNormalizer()),
    "a pattern replaced": normalized(normalizers.Replace(Regex("a+"), "a")),
    "text replaced by nothing": normalized(normalizers.Replace("a", "")),
    "a pattern removed": split(pre_tokenizers.Split("a", "removed")),
    "punctuation removed": split(pre_tokenizers.Punctuation("removed")),
    "a character removed": split(pre_tokenizers.CharDelimiterSplit("a")),
}
# Letters with marks that compose, whitespace of several kinds, runs, and what the tokenizers above make tokens of.
PARTS = ["a", "aa", "aaaa" * 8, " ", " " * 20, "\n", "\x85", "\u3000", "\x1c", "he", "llo", "ñ ñ", "he he he he", "<s>"]
PARTS += ["😀", "é", "e\u0301", "\u03b1\u0313\u0300\u0345", "\u1112\u1161\u11ab", "ﬁ", "İ", ".", "1", "_", "\ufdfa"]


@pytest.mark.parametrize("name", BOUNDED)
@given(data=st.data())
@settings(max_examples=100)
def test_a_text_never_has_fewer_tokens_than_the_bound(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=30)))
    tokenizer, bound = BOUNDED[name], length_bound(BOUNDED[name])
    assert bound is not None
    assert bound.least_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_there_is_no_bound_where_text_may_vanish_or_become_one_token(name: str) -> None:
    assert length_bound(UNBOUNDED[name]) is None


def test_bound_is_reached_by_the_longest_token() -> None:
    tokenizer = long_tokens()
    bound = length_bound(tokenizer)
    assert bound == LengthBound(16)
    assert bound.least_num_tokens("a" * 16_000) == 1000 == len(tokenizer.encode("a" * 16_000).ids)


def test_whitespace_is_not_counted_where_a_token_may_take_any_amount_of_it() -> None:
    tokenizer = with_added(lstrip=True)
    bound = length_bound(tokenizer)
    assert bound is not None and bound.ignores_whitespace
    text = " " * 100_000 + "he he he he"
    assert bound.least_num_tokens(text) <= len(tokenizer.encode(text).ids) == 1


def test_composition_makes_one_character_of_four_at_most() -> None:
    """The factor for NFC and NFKC: over every code point, the longest canonical decomposition."""
    nfd = normalizers.NFD()
    chars = (chr(code) for code in itertools.chain(range(0xD800), range(0xE000, 0x110000)))
    assert max(len(nfd.normalize_str(char)) for char in chars) == 4
