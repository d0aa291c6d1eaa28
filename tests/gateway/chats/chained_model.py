"""A checkpoint that writes what a test wants: each token of a chain is followed by the next one, whatever came before.

Attention and MLP add nothing, and the head's row of a token is the embedding of its predecessor. So the last token of
the prompt, which the chat template writes, decides what is generated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.makers import EOS_TOKEN_ID, make_checkpoint, make_tokenizer

_NUM_BYTES = 256  # tokens of make_tokenizer
_GAIN = 20.0


def make_chained_model(
    directory: Path, chains: Sequence[Sequence[str]], chat_template: str, *, special: Sequence[str] = (), **sizes: Any
) -> Path:
    """Write it and return `directory`. Every text of `chains` is one token and occurs once; a chain's end ends all.

    `sizes` are those of make_checkpoint.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    texts = [text for chain in chains for text in chain]
    assert len(set(texts)) == len(texts), "a token has one successor"
    ids = {text: _NUM_BYTES + position for position, text in enumerate(texts)}
    make_tokenizer(make_checkpoint(directory, arch="llama", vocab_size=_NUM_BYTES + len(texts), **sizes))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in texts:
        (tokenizer.add_special_tokens if text in special else tokenizer.add_tokens)([text])
    assert all(tokenizer.token_to_id(text) == token_id for text, token_id in ids.items())
    tokenizer.save(str(directory / "tokenizer.json"))
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": chat_template}))

    file = directory / "model.safetensors"
    weights = load_file(file)
    embedding = torch.nn.functional.normalize(weights["model.embed_tokens.weight"], dim=1)
    head = torch.zeros_like(embedding)
    for chain in chains:
        for text, successor in zip(chain, [*chain[1:], None], strict=True):
            head[EOS_TOKEN_ID if successor is None else ids[successor]] += _GAIN * embedding[ids[text]]
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(weights, file, {"format": "pt"})
    return directory
