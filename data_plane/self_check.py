"""Checks an engine with a fixed prompt, twice: before the worker attaches and when the control plane doubts it.

A damaged checkpoint shard, a GPU with broken memory or a kernel that fails on one machine mostly shows in any prompt. A
worker whose logits are never finite would end requests fastest, and so receive the most.
"""

from __future__ import annotations

import logging

import numpy as np

from data_plane.errors import SelfCheckFailed
from data_plane.plan import GREEDY, Capacities, Engine, NewRow, StepPlan

logger = logging.getLogger(__name__)

NUM_PROMPT, NUM_STEPS = 8, 3  # tokens; steps of one run, the prefill included
FIRST_TOKEN = 10  # of the prompt: ordinary characters in most vocabularies, no special tokens


def check_engine(engine: Engine) -> None:
    """Raise SelfCheckFailed where the engine's logits are not finite, or not the same each time.

    The engine is empty before and after.
    """
    capacities = engine.capacities
    room = min(capacities.num_blocks * capacities.block_size, capacities.max_model_len) - NUM_STEPS
    num_prompt = min(NUM_PROMPT, room, capacities.max_step_tokens)
    if num_prompt < 1:
        logger.info("no self-check: %d tokens fit this worker", room + NUM_STEPS)
        return
    first, second = (_generate(engine, capacities, num_prompt) for _ in range(2))
    if first != second:
        raise SelfCheckFailed(
            f"a fixed prompt gave tokens {first}, and {second} the second time: this device computes wrongly; serve on "
            "another one"
        )


def _generate(engine: Engine, capacities: Capacities, num_prompt: int) -> list[int]:
    """The tokens of a short greedy completion."""
    num_blocks = -(-(num_prompt + NUM_STEPS) // capacities.block_size)
    row = NewRow(
        row=0,
        token_ids=np.arange(FIRST_TOKEN, FIRST_TOKEN + num_prompt, dtype=np.int32) % capacities.vocab_size,
        num_prompt_tokens=num_prompt,
        num_computed_tokens=0,
        block_ids=np.arange(num_blocks, dtype=np.int32),
        slot=None,
        slot_generation=0,
        sampling=GREEDY,
    )
    prefill = StepPlan(1, new_rows=[row], prefills=np.array([[0, num_prompt]], dtype=np.int32))
    tokens: list[int] = []
    try:
        for plan in (prefill, *(StepPlan(step_id) for step_id in range(2, NUM_STEPS + 1))):
            output = engine.execute(plan)
            if len(output.failed_rows):
                raise SelfCheckFailed(
                    f"the logits of a fixed prompt are not finite in step {plan.step_id}: a shard of the checkpoint is "
                    "damaged, or this device computes wrongly; fetch the checkpoint again, or serve on another device"
                )
            tokens += output.token_ids.tolist()
    finally:
        engine.reset()
    return tokens
