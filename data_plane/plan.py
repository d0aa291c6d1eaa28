"""Decoded step plans and what an engine is: the seam between the plan stream and the code that computes.

`data_plane.wire` builds these from protobuf, an engine (the real one, or the fake of the tests) executes them.
No torch here: the fake worker runs without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row's tokens are chosen."""

    temperature: float  # softmax temperature, no unit; 0 is greedy
    top_k: int  # most likely tokens kept; 0 keeps all
    top_p: float  # nucleus, no unit, in (0, 1]
    seed: int  # 64-bit unsigned


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that takes a row."""

    row: int
    token_ids: Int32Array  # [num_tokens] prompt, then what was generated before
    num_prompt_tokens: int
    num_computed_tokens: int  # leading tokens whose KV lies in block_ids already
    block_ids: Int32Array  # [num_blocks]
    slot: int | None  # None: no adapter
    slot_generation: int
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, as it travelled: a difference to the state that the engine keeps (see plan.proto)."""

    step_id: int
    freed_rows: Int32Array  # [n]
    new_rows: list[NewRow]
    appended_blocks: Int32Array  # [n, 2] (row, block id)
    paused_rows: Int32Array  # [n]
    resumed_rows: Int32Array  # [n]
    prefills: Int32Array  # [n, 2] (row, number of tokens)
    block_copies: Int32Array  # [n, 2] (source, destination)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens of one step."""

    step_id: int
    rows: Int32Array  # [n] rows that sampled, in the order of the step
    token_ids: Int32Array  # [n]
    failed_rows: Int32Array  # [n] rows whose logits were not finite
    step_time_us: int


@dataclass(frozen=True, slots=True)
class Capacities:
    """What an engine can hold; becomes the Hello."""

    model_fingerprint: str  # 64 lower-case hexadecimal digits
    dtype: str  # "float32", "bfloat16" or "float16"
    device: str  # for people
    num_blocks: int
    block_size: int  # tokens
    max_rows: int
    max_step_tokens: int
    arena_bytes: int
    num_slots: int
    max_model_len: int  # tokens
    vocab_size: int  # tokens


class AdapterSource(Protocol):
    """Where packed adapters come from: the host cache, or the control plane. Thread-safe; blocks."""

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        """The canonical manifest and then its chunks in order, every hash verified.

        Raises data_plane.errors.AdapterUnavailable if no tier gives it.
        """


class AdapterSlots(Protocol):
    """The slots of one engine. `load` runs on loader threads, everything else on the compute thread."""

    def load(self, slot: int, generation: int, digest: str, source: AdapterSource) -> None:
        """Fill an empty slot; afterwards plans may name (slot, generation).

        Raises data_plane.errors.AdapterLoadError; the slot is empty again then.
        """

    def evict(self, slot: int, generation: int) -> None:
        """Empty the slot. Raises data_plane.errors.StaleSlot if it holds another generation."""

    def used_bytes(self) -> int:
        """Bytes of the arena in use."""

    def clear(self) -> None:
        """Empty every slot: a new session begins."""


class Engine(Protocol):
    """Executes step plans in order on one thread."""

    capacities: Capacities
    slots: AdapterSlots

    def execute(self, plan: StepPlan) -> StepOutput:
        """Apply the plan's differences, run one forward pass, sample.

        Raises data_plane.errors.PlanRefused where the plan contradicts the engine's state, a slot generation
        that is not the slot's included. The session ends then: nothing is guessed.
        """

    def reset(self) -> None:
        """Forget all rows, slots and KV: a new session begins."""
