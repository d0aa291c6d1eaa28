"""A worker in memory that executes step plans with a hash chain instead of a model, for scheduler tests.

The chain value after each token is stored in the KV block the plan gives, the adapter's digest is read from the slot
the plan names: a stale block, a wrong slot, a lost or doubled token becomes a wrong token. Tables, rows and slots are
checked as strictly as a real worker does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from control_plane.scheduler.types import (
    EvictSlot,
    LoadSlot,
    NewRow,
    Request,
    ScheduledRow,
    SlotCommand,
    StepPlan,
    StepResult,
    WorkerLimits,
)

VOCAB_SIZE = 50
POISON = b"freed"


def chain_start(digest: str | None) -> bytes:
    """h0 = SHA256(base, adapter digest)."""
    return hashlib.sha256(b"base" + (digest or "").encode()).digest()


def chain_step(value: bytes, token_id: int) -> bytes:
    """h' = SHA256(h, token)."""
    return hashlib.sha256(value + token_id.to_bytes(4, "little")).digest()


def token_of(value: bytes) -> int:
    """The token that follows."""
    return int.from_bytes(value[:4], "little") % VOCAB_SIZE


def oracle(request: Request, max_model_len: int) -> list[int]:
    """All tokens that the request generates when nothing disturbs it."""
    value = chain_start(request.adapter.digest if request.adapter else None)
    for token_id in request.prompt_token_ids:
        value = chain_step(value, token_id)
    tokens: list[int] = []
    limit = min(request.max_tokens, max_model_len - len(request.prompt_token_ids))
    while len(tokens) < limit:
        tokens.append(token_of(value))
        if tokens[-1] in request.stop_token_ids:
            break
        value = chain_step(value, tokens[-1])
    return tokens


@dataclass(slots=True)
class Row:
    """What the worker keeps of one request."""

    token_ids: list[int]  # fed or sampled
    num_known: int  # tokens given when the row began
    num_computed: int
    block_ids: list[int]
    slot: int | None
    slot_generation: int


def steps_of(plan: StepPlan) -> list[StepPlan]:
    """A plan of several steps as plans of one."""
    first = replace(plan, num_steps=1)
    decodes = [ScheduledRow(scheduled.row, 1, True) for scheduled in plan.scheduled]
    return [first, *(StepPlan(plan.step_id + idx, decodes) for idx in range(1, plan.num_steps))]


class ModelWorker:
    """Executes plans of one step in order."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self.kv: list[list[bytes]] = [[POISON] * limits.block_size for _ in range(limits.num_blocks)]
        self.rows: dict[int, Row] = {}
        self.slots: dict[int, tuple[int, str]] = {}  # slot -> (generation, digest)
        self.num_steps = 0

    def obey(self, command: SlotCommand) -> None:
        """Fill or empty a slot."""
        if isinstance(command, LoadSlot):
            assert command.slot not in self.slots, f"slot {command.slot} is loaded but not empty"
            self.slots[command.slot] = (command.generation, command.digest)
        elif isinstance(command, EvictSlot):
            assert self.slots[command.slot] == (command.generation, command.digest), "another adapter is evicted"
            del self.slots[command.slot]

    def poison(self, block_ids: list[int]) -> None:
        """Make blocks that nobody should read any more unreadable."""
        for block_id in block_ids:
            self.kv[block_id] = [POISON] * self.limits.block_size

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the differences, compute, sample."""
        assert plan.num_steps == 1, "steps_of was not asked"
        assert plan.step_id == self.num_steps + 1, "steps come out of order"
        self.num_steps += 1
        for freed in plan.freed_rows:
            del self.rows[freed]
        for new in plan.new_rows:
            self._begin(new)
        for row_idx, block_id in plan.appended_blocks:
            self.rows[row_idx].block_ids.append(block_id)
        assert sum(scheduled.num_tokens for scheduled in plan.scheduled) <= self.limits.max_step_tokens
        assert len({scheduled.row for scheduled in plan.scheduled}) == len(plan.scheduled)
        kinds = [scheduled.is_decode for scheduled in plan.scheduled]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        rows, token_ids = [], []
        for scheduled in plan.scheduled:
            token_id = self._compute(self.rows[scheduled.row], scheduled.num_tokens, is_decode=scheduled.is_decode)
            if token_id is not None:
                rows.append(scheduled.row)
                token_ids.append(token_id)
        return StepResult(plan.step_id, rows, token_ids)

    def _begin(self, new: NewRow) -> None:
        assert new.row not in self.rows, f"row {new.row} begins but is taken"
        assert new.num_computed_tokens < len(new.token_ids), "nothing is left to compute"
        self.rows[new.row] = Row(
            token_ids=list(new.token_ids),
            num_known=len(new.token_ids),
            num_computed=new.num_computed_tokens,
            block_ids=list(new.block_ids),
            slot=new.slot,
            slot_generation=new.slot_generation,
        )

    def _compute(self, row: Row, num_tokens: int, *, is_decode: bool) -> int | None:
        assert is_decode == (row.num_computed >= row.num_known), "decode and prefill are confused"
        assert not is_decode or num_tokens == 1
        digest = None
        if row.slot is not None:
            generation, digest = self.slots[row.slot]
            assert generation == row.slot_generation, "the slot holds another generation"
        size = self.limits.block_size
        value = chain_start(digest)
        if row.num_computed:
            last = row.num_computed - 1
            value = self.kv[row.block_ids[last // size]][last % size]
        for position in range(row.num_computed, row.num_computed + num_tokens):
            value = chain_step(value, row.token_ids[position])
            self.kv[row.block_ids[position // size]][position % size] = value
        row.num_computed += num_tokens
        if row.num_computed < row.num_known:
            return None
        assert row.num_computed == len(row.token_ids), "a row skipped a token"
        row.token_ids.append(token_of(value))
        return row.token_ids[-1]
