"""An engine whose model is a hash chain, so that every mistake of the plan stream becomes a wrong token.

h(i+1) of tests.fakes.hash_model is stored at position i of the KV blocks that the plan names, and read back from
there; the digest is read from the slot that the plan names. A stale or clobbered block, a block moved or copied
wrongly, a wrong slot, a lost or a doubled token changes every token after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from data_plane.errors import PlanRefused
from data_plane.plan import (
    AdapterSlots,
    Capacities,
    DoneStep,
    Int32Array,
    NewRow,
    PendingStep,
    PooledRow,
    PoolingKind,
    RowAdapters,
    RowLogprobs,
    RowSampling,
    StepOutput,
    StepPlan,
    Vocabulary,
)
from tests.fakes.hash_model import (
    DEFAULT_VOCAB_SIZE,
    activated,
    chain_next,
    chain_start,
    choose,
    combined_digest,
    logprob_of,
    oracle,
    ranking,
    vector_of,
)
from tests.fakes.hash_slots import HashSlots

__all__ = ["DEFAULT_VOCAB_SIZE", "POISON", "HashEngine", "HashEngineFaults", "oracle"]

POISON = b"never written..................."  # what a position holds until its owner writes it; as long as a hash


@dataclass(slots=True)
class _Row:
    number: int
    tokens: list[int]  # known at the row's beginning
    num_prompt: int
    block_ids: list[int]
    num_computed: int
    slot: int | None
    slot_generation: int
    digest: str
    sampling: RowSampling
    is_host_fed: bool
    pooling: PoolingKind | None
    adapters: RowAdapters | None
    active_from: int
    last_token: int = -1  # sampled last, or fed in its place
    num_generated: int = 0  # tokens of the completion, those given at the row's beginning included
    is_right: bool = True  # what was said to be computed was in its blocks
    given_away: set[int] = field(default_factory=set)  # of block_ids: swapped out, and no longer its own
    block_ends: list[bytes] = field(default_factory=list)  # what the last position of each full block must hold


@dataclass(frozen=True, slots=True, kw_only=True)
class HashEngineFaults:
    """What a hash engine does wrong on purpose."""

    step_time_s: float = 0.0  # least time of a step
    crash_token: int | None = None  # feeding this token crashes the worker
    hang_token: int | None = None  # feeding this token hangs the compute thread for ever
    non_finite_token: int | None = None  # sampling this token fails the row instead
    on_crash: Callable[[], None] = lambda: None  # called before the crash is raised; a process may end itself here


class HashEngine:
    """Executes plans as data_plane.plan.Engine requires, checking all it can."""

    def __init__(self, capacities: Capacities, faults: HashEngineFaults | None = None) -> None:
        self.capacities = capacities
        self.faults = faults or HashEngineFaults()
        self.hash_slots = HashSlots(capacities.num_slots, capacities.arena_bytes)
        self.slots: AdapterSlots = self.hash_slots
        self.num_resets = 0
        self.read_digests: list[str] = []  # of vocabularies
        self._blocks: list[list[bytes]] = []
        self._left: dict[int, list[bytes]] = {}  # block -> what it held when its row was freed, until it is another's
        self._host_blocks: list[list[bytes]] = []
        self.rows: dict[int, _Row] = {}
        self._written: set[int] = set()  # places that this step wrote
        # Invariant: a row past its prefill is in exactly one of these.
        self._decoding: set[int] = set()
        self._paused: set[int] = set()
        self._host_fed: set[int] = set()
        self._idle: set[int] = set()  # has returned its vector
        self._forget()

    def reset(self) -> None:
        """Forget everything."""
        self._forget()
        self.slots.clear()
        self.num_resets += 1

    def read_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Write down that it came."""
        self.read_digests.append(vocabulary.digest)

    def submit(self, plan: StepPlan) -> PendingStep:
        """The step has ended when this returns."""
        return DoneStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepOutput:
        """One step of every decoding row, the fed ones and the prefills."""
        start_s = time.perf_counter()
        fed = self._apply_differences(plan)
        self._written.clear()
        decoding = sorted(self._decoding | fed)
        num_tokens = len(decoding) + int(plan.prefills[:, 1].sum())
        if num_tokens > self.capacities.max_step_tokens:
            raise PlanRefused(f"{num_tokens} tokens in a step of at most {self.capacities.max_step_tokens}")
        prompt_logprobs: list[RowLogprobs] = []
        sampled = [(row_id, self._decode(self.rows[row_id], plan.step_id)) for row_id in decoding]
        for row_id, num_new in plan.prefills.tolist():
            value = self._prefill(row_id, num_new, prompt_logprobs)
            if value is not None:
                sampled.append((row_id, value))
        tokens = [(row_id, value, self._sample(self.rows[row_id], value)) for row_id, value in sampled]
        failed = [row_id for row_id, _, token in tokens if token == self.faults.non_finite_token]
        tokens = [item for item in tokens if item[0] not in failed]
        rest_s = self.faults.step_time_s - (time.perf_counter() - start_s)
        if rest_s > 0:
            time.sleep(rest_s)
        return StepOutput(
            plan.step_id,
            _int32([row_id for row_id, _, _ in tokens]),
            _int32([token for _, _, token in tokens]),
            _int32(failed),
            int((time.perf_counter() - start_s) * 1e6),
            [
                self._logprobs(row_id, self.rows[row_id].num_computed, [(value, token)], num_top)
                for row_id, value, token in tokens
                if (num_top := self.rows[row_id].sampling.num_logprobs) is not None
            ],
            prompt_logprobs,
            pooled=[
                PooledRow(row_id, vector_of(value, pooling.value, self.capacities.hidden_width))
                for row_id, value, _ in tokens
                if (pooling := self.rows[row_id].pooling) is not None
            ],
        )

    # ---- differences ----

    def _apply_differences(self, plan: StepPlan) -> set[int]:
        """The plan up to its forward pass; the rows that are fed."""
        # Blocks keep what they hold until everything that the plan moves or copies was read.
        left: list[int] = []
        for row_id in plan.freed_rows.tolist():
            left += self._free(row_id)
        poisoned: list[int] = []  # they have a new owner
        # Blocks that are swapped out may be others' from this plan on, though the row is freed by a later one.
        swapped_out = set(plan.swap_outs[:, 0].tolist())
        for row in self.rows.values() if swapped_out else ():
            row.given_away.update(swapped_out.intersection(row.block_ids))
        begun = [self._begin(new, poisoned) for new in plan.new_rows]
        for row_id, block_id in plan.appended_blocks.tolist():
            self._row(row_id).block_ids.append(self._checked_block(block_id))
            poisoned.append(block_id)
        self._pause(plan)
        fed = {self._feed(row_id, token) for row_id, token in plan.fed_tokens.tolist()}
        self._move_blocks(plan, poisoned, left)
        for row in begun:
            self._check_computed(row)
        return fed

    def _pause(self, plan: StepPlan) -> None:
        for row_id in plan.paused_rows.tolist():
            if row_id not in self._decoding:
                raise PlanRefused(f"row {row_id} is paused and does not decode")
            self._decoding.remove(row_id)
            self._paused.add(row_id)
        for row_id in plan.resumed_rows.tolist():
            if row_id not in self._paused:
                raise PlanRefused(f"row {row_id} is resumed and was not paused")
            self._paused.remove(row_id)
            self._decoding.add(row_id)

    def _feed(self, row_id: int, token: int) -> int:
        if row_id not in self._host_fed:
            raise PlanRefused(f"fed_tokens names row {row_id}, which is not a host-fed row past its prefill")
        if not 0 <= token < self.capacities.vocab_size:
            raise PlanRefused(f"fed_tokens gives row {row_id} token {token}")
        self.rows[row_id].last_token = token
        return row_id

    def _move_blocks(self, plan: StepPlan, poisoned: list[int], left: list[int]) -> None:
        """Swaps out, swaps in, copies; then blocks of new owners and free blocks hold poison.

        What rows left in theirs may still be moved or copied, for a fork that begins later; to attention it is poison.
        """
        self._left |= {block_id: self._blocks[block_id] for block_id in left}
        for block_id, host_block in plan.swap_outs.tolist():
            self._host_blocks[self._checked_host_block(host_block)] = self._content(block_id)
        written: set[int] = set()
        for host_block, block_id in plan.swap_ins.tolist():
            self._blocks[self._checked_block(block_id)] = self._host_blocks[self._checked_host_block(host_block)]
            self._host_blocks[host_block] = self._poison()
            self._left.pop(block_id, None)
            written.add(block_id)
        copies = [
            (self._content(source), self._checked_block(destination))
            for source, destination in plan.block_copies.tolist()
        ]
        for content, destination in copies:
            self._blocks[destination] = content
            written.add(destination)
        for block_id in (*poisoned, *left):
            if block_id not in written:
                self._blocks[block_id] = self._poison()
        for block_id in (*poisoned, *written):
            self._left.pop(block_id, None)

    def _content(self, block_id: int) -> list[bytes]:
        """What a move or a copy takes from a block."""
        return list(self._left.get(block_id) or self._blocks[self._checked_block(block_id)])

    def _begin(self, new: NewRow, poisoned: list[int]) -> _Row:
        if new.row in self.rows or not 0 <= new.row < self.capacities.max_rows:
            raise PlanRefused(f"row {new.row} begins and is in use or out of range")
        tokens, block_ids, num_computed = new.token_ids.tolist(), new.block_ids.tolist(), new.num_computed_tokens
        if not 0 <= num_computed < len(tokens) or len(tokens) > self.capacities.max_model_len:
            raise PlanRefused(f"row {new.row}: {num_computed} of {len(tokens)} tokens are computed")
        num_held = -(-num_computed // self.capacities.block_size)
        if num_held > len(block_ids):
            raise PlanRefused(f"row {new.row}: {num_computed} tokens are computed in {len(block_ids)} blocks")
        if new.pooling not in (None, PoolingKind.LAST) and num_computed:
            raise PlanRefused(f"row {new.row} pools all its tokens with {num_computed} tokens computed")
        if new.sampling.num_prompt_logprobs is not None and num_computed:
            raise PlanRefused(f"row {new.row} requests its prompt's logprobs with {num_computed} tokens computed")
        digest = self._digest_of(new)
        row = _Row(
            new.row,
            tokens,
            new.num_prompt_tokens,
            block_ids,
            num_computed,
            new.slot,
            new.slot_generation,
            digest,
            new.sampling,
            new.is_host_fed,
            new.pooling,
            new.adapters,
            new.active_from,
            num_generated=len(tokens) - new.num_prompt_tokens,
        )
        poisoned += [self._checked_block(block_id) for block_id in block_ids[num_held:]]
        self.rows[new.row] = row
        return row

    def _check_computed(self, row: _Row) -> None:
        """Compare what is said to be computed with the tokens; if it differs, all tokens from here on are wrong."""
        size = self.capacities.block_size
        value, is_right = self._chain_start(row, row.digest), True
        for position in range(row.num_computed):
            if position and position == row.active_from:
                value = activated(value, row.digest)
            value = chain_next(value, row.tokens[position])
            is_right &= self._blocks[row.block_ids[position // size]][position % size] == value
            if (position + 1) % size == 0:
                row.block_ends.append(value)
        row.is_right = is_right

    def _free(self, row_id: int) -> list[int]:
        """End a row. Its blocks that are in nobody else's table, since they are not full."""
        row = self._row(row_id)
        del self.rows[row_id]
        for rows in (self._decoding, self._paused, self._host_fed, self._idle):
            rows.discard(row_id)
        kept = row.block_ids[row.num_computed // self.capacities.block_size :]
        return [block_id for block_id in kept if block_id not in row.given_away]

    def _poison(self) -> list[bytes]:
        return [POISON] * self.capacities.block_size

    def _checked_block(self, block_id: int) -> int:
        if not 0 <= block_id < self.capacities.num_blocks:
            raise PlanRefused(f"block {block_id} is not one of {self.capacities.num_blocks}")
        return block_id

    def _checked_host_block(self, host_block: int) -> int:
        if not 0 <= host_block < self.capacities.num_host_blocks:
            raise PlanRefused(f"host block {host_block} is not one of {self.capacities.num_host_blocks}")
        return host_block

    # ---- the model ----

    def _decode(self, row: _Row, step_id: int) -> bytes:
        """Feed the row's last token; the chain after it."""
        value = self._advance(row, row.last_token)
        ends = row.block_ends
        if ends:  # one earlier block per step: attention reads them all
            index = step_id % len(ends)
            if self._blocks[row.block_ids[index]][-1] != ends[index]:
                value = POISON
        return value

    def _prefill(self, row_id: int, num_tokens: int, returned: list[RowLogprobs]) -> bytes | None:
        """Compute known tokens; the chain after the last known one if it is among them."""
        row = self._row(row_id)
        begin, end = row.num_computed, row.num_computed + num_tokens
        is_past_prefill = any(row_id in rows for rows in (self._decoding, self._paused, self._host_fed, self._idle))
        if num_tokens < 1 or end > len(row.tokens) or is_past_prefill:
            raise PlanRefused(f"row {row_id}: prefill of {num_tokens} tokens after {row.num_computed}")
        values = [self._advance(row, token) for token in row.tokens[begin:end]]
        followers = row.tokens[begin + 1 : min(end + 1, row.num_prompt)]
        num_top = row.sampling.num_prompt_logprobs
        if num_top is not None and followers:
            pairs = list(zip(values, followers, strict=False))
            returned.append(self._logprobs(row_id, begin + 1, pairs, num_top))
        if end < len(row.tokens):
            return None
        if row.pooling is not None:
            self._idle.add(row_id)
        else:
            (self._host_fed if row.is_host_fed else self._decoding).add(row_id)
        return values[-1]

    def _sample(self, row: _Row, value: bytes) -> int:
        if row.pooling is not None:
            return 0
        sampling, position = row.sampling, row.num_generated
        banned = sampling.banned_token_ids if position < sampling.min_tokens else None
        seed = sampling.seed if sampling.temperature > 0 else None
        row.last_token = choose(
            value,
            self.capacities.vocab_size,
            seed=seed,
            position=position,
            banned=() if banned is None else banned.tolist(),
        )
        row.num_generated += 1
        return row.last_token

    def _logprobs(
        self, row_id: int, first_position: int, followed: list[tuple[bytes, int]], num_top: int
    ) -> RowLogprobs:
        """Log-probabilities of tokens, each after its chain."""
        vocab_size = self.capacities.vocab_size
        of_tokens = [logprob_of(value, token, vocab_size) for value, token in followed]
        tops = [ranking(value, num_top, vocab_size)[:num_top] for value, _ in followed]
        shape = (len(followed), num_top)
        return RowLogprobs(
            row_id,
            first_position,
            _int32([token for _, token in followed]),
            np.array([logprob for logprob, _ in of_tokens], dtype=np.float32),
            _int32([rank for _, rank in of_tokens]),
            _int32([token for top in tops for token, _ in top]).reshape(shape),
            np.array([logprob for top in tops for _, logprob in top], dtype=np.float32).reshape(shape),
        )

    def _advance(self, row: _Row, token: int) -> bytes:
        """Feed one token: read the chain before it from the blocks, store the chain after it there."""
        if token == self.faults.hang_token:
            threading.Event().wait()
        if token == self.faults.crash_token:
            self.faults.on_crash()
            raise RuntimeError(f"crashed on token {token}")
        size, position = self.capacities.block_size, row.num_computed
        if position >= len(row.block_ids) * size:
            raise PlanRefused(f"position {position} lies beyond {len(row.block_ids)} blocks of {size}")
        digest = self._digest_of(row)
        if position == 0:
            value = self._chain_start(row, digest)
        else:
            value = self._blocks[row.block_ids[(position - 1) // size]][(position - 1) % size]
            if position == row.active_from:
                value = activated(value, digest)
        value = chain_next(value, token) if row.is_right else POISON
        block_id = row.block_ids[position // size]
        if block_id * size + position % size in self._written:
            raise PlanRefused(f"two tokens of the step would be written to place {position % size} of block {block_id}")
        self._written.add(block_id * size + position % size)
        self._blocks[block_id][position % size] = value
        row.num_computed = position + 1
        if row.num_computed % size == 0:
            row.block_ends.append(value)
        return value

    def _chain_start(self, row: _Row, digest: str) -> bytes:
        return chain_start(self.capacities.model_fingerprint, "" if row.active_from else digest)

    def _digest_of(self, row: NewRow | _Row) -> str:
        """What the row's slots hold: one adapter, or what stands for several."""
        if row.adapters is not None:
            members = row.adapters.members
            held = [(self.hash_slots.digest_of(m.slot, m.generation), m.scale) for m in members]
            return combined_digest(held, is_linear=row.adapters.is_linear)
        return "" if row.slot is None else self.hash_slots.digest_of(row.slot, row.slot_generation)

    def _row(self, row_id: int) -> _Row:
        row = self.rows.get(row_id)
        if row is None:
            raise PlanRefused(f"row {row_id} is not in use")
        return row

    def _forget(self) -> None:
        self._blocks = [self._poison() for _ in range(self.capacities.num_blocks)]
        self._host_blocks = [self._poison() for _ in range(self.capacities.num_host_blocks)]
        self._left.clear()
        self.rows.clear()
        self._decoding.clear()
        self._paused.clear()
        self._host_fed.clear()
        self._idle.clear()


def _int32(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)
