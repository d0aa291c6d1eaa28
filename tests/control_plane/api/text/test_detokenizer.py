"""Incremental text equals decode(all ids), whatever the tokens and however they are chunked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models

from control_plane.api.text.detokenizer import BYTE_BY_CHAR, DetokenizerFactory
from control_plane.api.text.stop_strings import StopStrings
from control_plane.api.text.stream import TextStream
from tests.control_plane.api.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    words = ["[UNK]", "hello", "##ing", "wor", "##ld", ".", ",", "'", "do", "not", "n't"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def sequence_byte_level_tokenizer() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def straddling_tokenizer() -> Tokenizer:
    """Tokens that begin and end within code points."""
    tokenizer = sequence_byte_level_tokenizer()
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    char_by_byte = {value: char for char, value in BYTE_BY_CHAR.items()}
    for bytes_ in (b"\x82a\xe2", b"\xac\xf0\x9f", b"\x98\x80\xe2\x82", b"\xe2\x82", b"\xf0", b"\x80\x80", b"\xed\xa0"):
        vocab["".join(char_by_byte[value] for value in bytes_)] = len(vocab)
    tokenizer.model = models.BPE(vocab=vocab, merges=[])
    return tokenizer


def bare_tokenizer() -> Tokenizer:
    return Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1, "c": 2}, unk_token="a"))


TOKENIZERS = {
    "byte level": byte_level_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(),
    "wordpiece": wordpiece_tokenizer(),
    "byte level in a sequence": sequence_byte_level_tokenizer(),
    "byte level in a sequence, tokens that straddle": straddling_tokenizer(),
    "no decoder": bare_tokenizer(),
}
FACTORIES = {name: DetokenizerFactory(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150)
def test_pieces_join_to_the_text_of_all_tokens(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # A few ids more than there are: logits are often padded.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=40))
    detokenizer = FACTORIES[name].make()
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=80)
def test_pieces_with_special_tokens_join_to_the_text_that_keeps_them(name: str, data: st.DataObject) -> None:
    tokenizer, factory = TOKENIZERS[name], FACTORIES[name].keeping_special()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=40))
    special = sorted(factory.special_tokens())
    ids += data.draw(st.lists(st.sampled_from(special), max_size=2)) if special else []
    detokenizer = factory.make()
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["byte level", "metaspace", "byte fallback"])
@given(data=st.data())
@settings(max_examples=60)
def test_text_after_k_tokens_does_not_depend_on_chunks(name: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, TOKENIZERS[name].get_vocab_size() - 1), min_size=1, max_size=30))
    stops = data.draw(st.lists(st.text("ahelo é", min_size=1, max_size=3), max_size=3))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=6)) | {len(ids)})
    searched = StopStrings(stops)
    one, many = TextStream(FACTORIES[name].make(), searched), TextStream(FACTORIES[name].make(), searched)
    whole = one.push(ids)
    text, start, num_tokens, stop = "", 0, 0, None
    for cut in cuts:
        piece = many.push(ids[start:cut])
        text, num_tokens, start = text + piece.text, num_tokens + piece.num_tokens, cut
        if piece.stop_string is not None:
            stop = piece.stop_string
            break
    assert (text, num_tokens, stop) == (whole.text, whole.num_tokens, whole.stop_string)


def test_an_emoji_split_over_tokens_arrives_whole() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = [tokenizer.token_to_id(token) or 0 for token in ("he", "ðŁ", "ĺ", "Ģ", "ll")]
    detokenizer = FACTORIES["byte level"].make()
    assert [detokenizer.push(token_id) for token_id in ids] == ["he", "", "", "😀", "ll"]


def test_byte_tokens_are_held_until_their_run_ends() -> None:
    """A run of byte tokens that is malformed anywhere decodes to replacement characters as a whole."""
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.token_to_id(token) or 0 for token in ("<0xC3>", "<0xA9>", "<0xFF>", "a")]
    detokenizer = FACTORIES["byte fallback"].make()
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "", "", "\ufffd\ufffd\ufffda"]


class CountingFactory(DetokenizerFactory):
    """Records the most tokens that were decoded at once."""

    longest = 0

    def decode(self, token_ids: list[int]) -> str:
        self.longest = max(self.longest, len(token_ids))
        return super().decode(token_ids)


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    factory = CountingFactory(TOKENIZERS["metaspace"])
    detokenizer = factory.make()
    for index in range(5000):
        detokenizer.push(index % 13)
    assert factory.longest <= 6


@pytest.mark.parametrize("broken", ["80", "ff", "c3", "e2 82", "f0 9f 98", "8261e2", "82e282 f0", "9f61f0 9f98"])
def test_cost_of_a_token_does_not_grow_with_broken_bytes(broken: str) -> None:
    """Text that ends in U+FFFD is final but for an unfinished code point, whatever the tokens break."""
    char_by_byte = {value: char for char, value in BYTE_BY_CHAR.items()}
    tokens = ["".join(char_by_byte[value] for value in bytes.fromhex(token)) for token in broken.split()]
    tokenizer = sequence_byte_level_tokenizer()
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    for token in tokens:
        vocab.setdefault(token, len(vocab))
    tokenizer.model = models.BPE(vocab=vocab, merges=[])
    ids = [vocab[token] for token in tokens] * 1000
    factory = CountingFactory(tokenizer)
    detokenizer = factory.make()
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.finish()
    assert factory.longest <= 10
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60)
def test_spelled_tokens_join_to_the_text_behind_another_token(name: str, data: st.DataObject) -> None:
    """A token's bytes are those that it adds within a text; only what cuts code points apart cannot be compared."""
    tokenizer, factory = TOKENIZERS[name], FACTORIES[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=12))
    ids = [token_id for token_id in ids if not factory.is_skipped(token_id)]
    start = next(
        i for i in range(tokenizer.get_vocab_size()) if factory.decode([i]).isalnum() and not factory.is_skipped(i)
    )
    whole = factory.decode([start, *ids])
    if "\ufffd" not in whole and name != "wordpiece":  # a decoder that looks at pairs cleans up spaces
        assert b"".join(factory.spelled(token_id) for token_id in [start, *ids]).decode() == (
            (" " if factory.spelled(start).startswith(b" ") else "") + whole
        )


def test_special_and_byte_tokens_are_spelled_as_they_are_written() -> None:
    factory = FACTORIES["byte fallback"]
    line_feed = TOKENIZERS["byte fallback"].token_to_id("<0x0A>")
    assert line_feed is not None and factory.spelled(line_feed) == b"\n"
    special = FACTORIES["wordpiece"].special_tokens()
    assert list(special.values()) == ["[CLS]"] and FACTORIES["wordpiece"].spelled(next(iter(special))) == b"[CLS]"
    assert factory.spelled(10**6) == b""
