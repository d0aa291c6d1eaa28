"""A tokenizer without the tokens that its model has no logits for.

A checkpoint's tokenizer may have more tokens than its model: somebody added one for padding and left the embedding as
it was. The model never generates these, and llguidance refuses a tokenizer that has them.

Run as a program, with the number of the model's tokens, it reads a tokenizer.json and writes the one without them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from control_plane.child_process import module_command
from control_plane.errors import Unavailable

TIMEOUT_S = 60.0


def find_known_tokens(tokenizer: str, num_tokens: int) -> str:
    """`without_unknown_tokens` in a process of its own. Blocks. Raises Unavailable.

    JSON of many megabytes is read in one go, during which no other thread of a process runs.
    """
    command, environment = module_command(__name__, str(num_tokens))
    try:
        done = subprocess.run(
            command, env=environment, input=tokenizer.encode(), capture_output=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable("the process that reads the tokenizer for constraints failed; try again") from error
    return done.stdout.decode()


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
        if (model.get("unk_id") or 0) >= num_tokens:
            model["unk_id"] = None
        has_unknown = True
    elif isinstance(vocab, dict) and any(token_id >= num_tokens for token_id in vocab.values()):
        _cut(model, num_tokens)
        # Those that are in the vocabulary keep their ids; others would be counted from its new end.
        model["vocab"].update({token["content"]: token["id"] for token in known})
        has_unknown = True
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) if has_unknown else tokenizer


def _cut(model: dict[str, Any], num_tokens: int) -> None:
    """Leave the vocabulary its known tokens, and BPE the merges of known tokens that make one."""
    vocab = model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token_id < num_tokens}
    if "merges" not in model:
        return
    prefix = model.get("continuing_subword_prefix") or ""  # a merge leaves that of its second token out

    def is_known(merge: str | list[str]) -> bool:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        return left in vocab and right in vocab and left + right.removeprefix(prefix) in vocab

    model["merges"] = [merge for merge in model["merges"] if is_known(merge)]


if __name__ == "__main__":
    sys.stdout.buffer.write(without_unknown_tokens(sys.stdin.buffer.read().decode(), int(sys.argv[1])).encode())
