"""Converts a checkpoint's slow tokenizer into a tokenizer.json: `python -m control_plane.api.text.convert DIR OUT`.

A process of its own, because transformers may pull torch in, which the server never does. Runs no code of the
checkpoint and uses no network.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Write OUT; 0, or 1 with the reason on stderr."""
    if len(argv) != 2:
        print("usage: python -m control_plane.api.text.convert DIR OUT", file=sys.stderr)
        return 1
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            argv[0], local_files_only=True, trust_remote_code=False, use_fast=True
        )
        out = Path(argv[1])
        temporary = out.with_name(out.name + ".part")
        temporary.write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
        temporary.replace(out)
    except Exception as error:  # the process's edge: whatever is wrong, the server needs one line
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
