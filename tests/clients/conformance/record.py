"""`python -m tests.clients.conformance.record`: write down how vLLM responds to each case.

vLLM has to serve the checkpoint that `--make DIR` writes. `shapes_vllm.json` was recorded from this, on a CPU:

    python -m tests.clients.conformance.record --make DIR
    vllm serve DIR/chained --served-model-name chained --port 8123 --dtype float32 --max-model-len 512 \\
        --enforce-eager --enable-lora --max-lora-rank 8 --lora-modules plain=DIR/plain \\
        --enable-auto-tool-choice --tool-call-parser hermes
    python -m tests.clients.conformance.record --url http://127.0.0.1:8123

with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in the environment of `vllm serve`. Its parsers of reasoning take all text up to
`</think>` for reasoning, also where there is none, so that it runs without one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import httpx

from tests.clients.chained_checkpoint import make_chained_checkpoint
from tests.clients.conformance.cases import CASES
from tests.clients.conformance.shapes import shape_of
from tests.makers import make_adapter

RECORDED = Path(__file__).parent / "shapes_vllm.json"


def main() -> None:
    """Make the checkpoint, or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, metavar="DIR", help="write the checkpoint and the adapter there")
    parser.add_argument("--url", help="of vLLM's server")
    parser.add_argument("--out", type=Path, default=RECORDED)
    args = parser.parse_args()
    if args.make:
        checkpoint = make_chained_checkpoint(args.make / "chained")
        make_adapter(args.make / "plain", checkpoint, rank=2, targets=["q_proj"])
    if args.url:
        with httpx.Client(base_url=args.url, timeout=300) as client:
            version = client.get("/version").json()["version"]
            shapes = {name: shape_of(client, case) for name, case in CASES.items()}
        args.out.write_text(json.dumps({"vllm": version, "shapes": shapes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
