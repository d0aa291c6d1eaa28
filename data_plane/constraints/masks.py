"""The constrained rows of an engine: a mask for each token to come, computed on a thread beside the forward pass.

Every task runs on one thread in the order of its submission: a row's matcher exists before its first mask is computed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import llguidance
import numpy as np
import numpy.typing as npt
import torch

from data_plane.constraints.matchers import ConstraintFailed, Matchers
from data_plane.errors import PlanRefused
from data_plane.plan import Int32Array, NewRow, Vocabulary
from kernels.devices import upload

logger = logging.getLogger(__name__)

# What the logit of a token that is not allowed becomes. Finite: the check for logits that are not finite stays, and a
# row is left with a distribution where a bias bans every token that is allowed.
_LOWEST = -1e30
_T = TypeVar("_T")
_Bits = npt.NDArray[np.uint8]
_Indices = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Row:
    num_tokens: int  # of the vocabulary
    min_tokens: int
    banned: Int32Array | None  # before min_tokens
    matcher: llguidance.LLMatcher | None = None  # None: not made yet, or it failed
    error: str = ""


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of some rows of a step."""

    indices: _Indices  # of the rows among those that sample
    forbidden: _Bits  # [n, vocabulary / 8], bit 1: the token is not allowed
    lifted: list[int] = field(default_factory=list)  # rows where only banned tokens are allowed
    failed: list[int] = field(default_factory=list)  # indices of rows whose grammar failed


class ConstraintRows:
    """Used from the compute thread, but for the tasks that it submits itself."""

    def __init__(self, vocab_size: int, *, num_threads: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._num_threads = num_threads or max(1, min(4, (os.cpu_count() or 2) // 2))
        self._matchers = Matchers()
        self._rows: dict[int, _Row] = {}
        self._thread: ThreadPoolExecutor | None = None  # with the first constrained row
        self._executor: llguidance.LLExecutor | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, vocabulary: Vocabulary) -> None:
        """Read a vocabulary now: between two steps, so that no step waits for it."""
        self._submit(lambda: self._matchers.read(vocabulary)).result()

    def add(self, new: NewRow) -> None:
        """Begin a row. Raises PlanRefused for a row whose tokens are chosen elsewhere."""
        constraint = new.constraint
        if constraint is None:
            return
        if new.is_host_fed or new.pooling is not None:
            raise PlanRefused(f"new row {new.row} has a constraint and does not sample")
        if constraint.vocabulary.num_tokens > self._vocab_size:
            raise PlanRefused(f"new row {new.row} has a constraint over {constraint.vocabulary.num_tokens} tokens")
        row = _Row(constraint.vocabulary.num_tokens, new.sampling.min_tokens, new.sampling.banned_token_ids)
        self._rows[new.row] = row
        generated = new.token_ids[new.num_prompt_tokens :].tolist()

        def make() -> None:
            try:
                row.matcher = self._matchers.make(constraint, generated)
            except ConstraintFailed as error:
                row.error = str(error)

        self._submit(make)

    def free(self, rows: Int32Array) -> None:
        """End rows."""
        if self._rows:
            for row in rows.tolist():
                self._rows.pop(row, None)

    def clear(self) -> None:
        """End every row."""
        self._rows.clear()

    def begin(self, rows: _Indices, positions: _Indices) -> Future[Masks] | None:
        """Compute masks for those of the rows that have a constraint; None where none has.

        positions are those of the tokens to sample, in the rows' completions from 0.
        """
        if not self._rows:
            return None
        chosen = [(index, row) for index, row in enumerate(rows.tolist()) if row in self._rows]
        if not chosen:
            return None
        at = positions.tolist()
        return self._submit(lambda: self._compute([(index, row, at[index]) for index, row in chosen]))

    def advance(self, masks: Masks, rows: _Indices, token_ids: Int32Array) -> None:
        """Follow the tokens that were sampled."""
        for index in masks.indices.tolist():
            row = self._rows[int(rows[index])]
            if row.matcher is not None and not row.matcher.consume_token(int(token_ids[index])):
                row.error = row.matcher.get_error()

    def forced(self, rows: _Indices) -> dict[int, list[int]]:
        """By row, the tokens that its grammar forces next, where it forces any. No mask is being computed."""
        if not self._rows:
            return {}
        found = {}
        for number in rows.tolist():
            row = self._rows.get(number)
            if row is not None and row.matcher is not None and not row.error:
                found[number] = row.matcher.compute_ff_tokens()
        return {number: tokens for number, tokens in found.items() if tokens}

    def _submit(self, task: Callable[[], _T]) -> Future[_T]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        return self._thread.submit(task)

    def _compute(self, chosen: list[tuple[int, int, int]]) -> Masks:
        if self._executor is None:
            self._executor = llguidance.LLExecutor(self._num_threads)
        allowed = np.zeros((len(chosen), self._num_words), dtype=np.int32)
        by_width: dict[int, list[tuple[llguidance.LLMatcher, int]]] = {}
        for place, (_, number, _) in enumerate(chosen):
            row = self._rows[number]
            if row.matcher is not None and not row.error:
                by_width.setdefault(-(-row.num_tokens // 32), []).append((row.matcher, place))
        for width, matchers in by_width.items():
            if width == self._num_words:
                self._executor.unsafe_compute_mask_ptr(matchers, allowed.ctypes.data, width * 4, len(chosen))
                continue
            own = np.zeros((len(matchers), width), dtype=np.int32)
            pairs = [(matcher, index) for index, (matcher, _) in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, own.ctypes.data, width * 4, len(pairs))
            allowed[[place for _, place in matchers], :width] = own
        lifted, failed = [], []
        for place, (index, number, position) in enumerate(chosen):
            row = self._rows[number]
            if row.matcher is not None and row.matcher.is_error():
                row.error = row.error or row.matcher.get_error()
            if row.error:
                logger.warning("constraint failed row=%d: %s", number, row.error[:500])
                failed.append(index)
                allowed[place] = -1
            elif position < row.min_tokens and row.banned is not None and _has_only(allowed[place], row.banned):
                lifted.append(number)
        return Masks(np.array([index for index, _, _ in chosen]), (~allowed).view(np.uint8), lifted, failed)


def maskable(logits: torch.Tensor) -> torch.Tensor:
    """Logits in a dtype that holds `_LOWEST`: those of float16 are copied to float32.

    Penalties come after the mask. The lowest float16, -65504, times a repetition penalty of 0.01 is -655, which a
    frequency penalty can give to tokens that are allowed.
    """
    return logits.float() if logits.dtype == torch.float16 else logits


def forbid(logits: torch.Tensor, masks: Masks) -> torch.Tensor:
    """Lower the logits [n, vocab], in place, of every token that is not allowed. They are `maskable`.

    Returns whether the logits of the masked rows were finite before, bool [number of masked rows].
    """
    assert logits.dtype != torch.float16, "float16 cannot hold the logit of a token that is not allowed"
    vocab_size = logits.shape[1]
    at = upload(masks.indices, logits.device)
    is_every_row = len(masks.indices) == len(logits)
    own = logits if is_every_row else logits[at]
    finite = own.sum(dim=-1, dtype=torch.float32).isfinite()
    if logits.is_cuda:
        packed = upload(masks.forbidden, logits.device)
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = (packed.unsqueeze(-1) >> shifts & 1).flatten(1)[:, :vocab_size].bool()
    else:
        unpacked = np.unpackbits(masks.forbidden, axis=1, bitorder="little")[:, :vocab_size]
        bits = torch.from_numpy(unpacked).view(torch.bool)
    own.masked_fill_(bits, _LOWEST)
    if not is_every_row:
        logits[at] = own
    return finite


def _has_only(allowed: Int32Array, banned: Int32Array) -> bool:
    """Whether every token that is allowed is one of `banned`."""
    left = np.unpackbits(allowed.view(np.uint8), bitorder="little")
    left[banned] = 0
    return not left.any()
