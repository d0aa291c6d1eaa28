"""A tokenizer without the tokens that its model has no logits for.

A checkpoint's tokenizer may have more tokens than its model: somebody added one for padding and left the embedding as
it was. The model never generates these, and llguidance refuses a tokenizer that has them.
"""

from __future__ import annotations

import json
from typing import Any


def without_unknown_tokens(tokenizer: str, num_tokens: int) -> str:
    """The text of a tokenizer.json without token ids from `num_tokens` on; the same text if it has none."""
    document = json.loads(tokenizer)
    model, added = document["model"], document.get("added_tokens") or []
    known = [token for token in added if token["id"] < num_tokens]
    has_unknown = len(known) < len(added)
    document["added_tokens"] = known
    vocab = model.get("vocab")
    if isinstance(vocab, list) and len(vocab) > num_tokens:  # Unigram: the place is the id
        model["vocab"] = vocab[:num_tokens]
        has_unknown = True
    elif isinstance(vocab, dict) and any(token_id >= num_tokens for token_id in vocab.values()):
        model["vocab"] = {token: token_id for token, token_id in vocab.items() if token_id < num_tokens}
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if _is_known(merge, model["vocab"])]
        has_unknown = True
    return json.dumps(document, ensure_ascii=False) if has_unknown else tokenizer


def _is_known(merge: str | list[str], vocab: dict[str, Any]) -> bool:
    """Whether a merge is of known tokens and makes one."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in vocab and right in vocab and left + right in vocab
