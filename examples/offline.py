"""Run a list of prompts through the base model and an adapter, without a server of yours.

python examples/offline.py path/to/checkpoint path/to/peft-adapter
"""

from __future__ import annotations

import sys

from motet import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The party of the first part", "Thank you for"]


def main(checkpoint: str, adapter: str) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0.7, seed=1)
    with LLM(checkpoint, adapters={"mine": adapter}) as llm:
        # Each prompt twice: by the base model and by the adapter.
        outputs = llm.generate([prompt for prompt in PROMPTS for _ in range(2)], sampling, adapter=[None, "mine"] * 3)
    for output in outputs:
        print(f"{output.adapter or 'base model'}: {output.prompt}|{output.outputs[0].text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
