"""Small tokenizers of the usual kinds."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes, a few merges that split code points badly, one special and two added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    for token in ("Ġa", "ðŁ", "ðŁĺ", "Ģð", "he", "ll"):
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("Ġ", "a"), ("ð", "Ł")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["ñ ñ", "é"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Words that begin with a metaspace; the decoder strips the first one."""
    words = ["▁", "▁▁", "▁he", "llo", "▁wor", "ld", "😀", "é", "�", "<unk>", "a", "▁a"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2: metaspace words and byte tokens."""
    words = [f"<0x{value:02X}>" for value in range(256)] + ["▁", "▁▁", "▁he", "llo", "😀", "é", "a"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer
