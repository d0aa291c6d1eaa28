"""An engine whose model is a hash chain, so that every mistake of the plan stream becomes a wrong token.

h(0) = SHA256(base fingerprint, adapter digest); h(i+1) = SHA256(h(i), token i); the token after token i is
h(i+1) mod vocabulary. h(i+1) is stored at position i of the KV blocks that the plan names, and read back from there;
the digest is read from the slot that the plan names. A stale or clobbered block, a wrong slot, a lost or a doubled
token changes every token after it. Sampling settings play no part.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from data_plane.errors import AdapterCorrupt, AdapterLoadError, ArenaFull, PlanRefused, StaleSlot
from data_plane.plan import AdapterSlots, AdapterSource, Capacities, Int32Array, NewRow, StepOutput, StepPlan

DEFAULT_VOCAB_SIZE = 256
POISON = b"never written"  # what a position holds until its owner writes it
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_sha256 = hashlib.sha256


def chain_start(fingerprint: str, digest: str) -> bytes:
    """h(0); an empty digest is the base model."""
    return _sha256(bytes.fromhex(fingerprint) + bytes.fromhex(digest)).digest()


def chain_next(value: bytes, token: int) -> bytes:
    """h(i+1) from h(i) and token i."""
    return _sha256(value + token.to_bytes(4, "little")).digest()


def token_of(value: bytes, vocab_size: int) -> int:
    """The token that follows."""
    return int.from_bytes(value[:8], "little") % vocab_size


def oracle(
    fingerprint: str, digest: str, prompt: Sequence[int], num_tokens: int, *, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> list[int]:
    """What a correct system generates."""
    value = chain_start(fingerprint, digest)
    for token in prompt:
        value = chain_next(value, token)
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(token_of(value, vocab_size))
        value = chain_next(value, tokens[-1])
    return tokens


class HashSlots:
    """Adapter slots that keep a digest per slot. Reads the whole adapter through its source, and checks every hash."""

    def __init__(self, num_slots: int, arena_bytes: int) -> None:
        self._num_slots = num_slots
        self._arena_bytes = arena_bytes
        self._lock = threading.Lock()
        self._slots: dict[int, tuple[int, str, int]] = {}  # slot -> generation, digest, bytes
        self.failing: dict[str, bool] = {}  # digest -> whether the failure of its load is retryable
        self.num_loads = 0

    def load(self, slot: int, generation: int, digest: str, source: AdapterSource) -> None:
        """Read the adapter and take the slot."""
        if digest in self.failing:
            error = AdapterLoadError(f"adapter {digest} is set to fail")
            error.is_retryable = self.failing[digest]
            raise error
        size = _read_whole(digest, source)
        with self._lock:
            if not 0 <= slot < self._num_slots or slot in self._slots:
                raise AdapterLoadError(f"slot {slot} is not an empty one of {self._num_slots}")
            if self._used() + size > self._arena_bytes:
                raise ArenaFull(f"{size} bytes beside {self._used()} of {self._arena_bytes}")
            self._slots[slot] = (generation, digest, size)
            self.num_loads += 1

    def evict(self, slot: int, generation: int) -> None:
        """Empty the slot."""
        with self._lock:
            self._check(slot, generation)
            del self._slots[slot]

    def digest_of(self, slot: int, generation: int) -> str:
        """What the slot holds. Raises StaleSlot if it holds another generation."""
        with self._lock:
            return self._check(slot, generation)

    def used_bytes(self) -> int:
        """Bytes of the arena in use."""
        with self._lock:
            return self._used()

    def clear(self) -> None:
        """Empty every slot."""
        with self._lock:
            self._slots.clear()

    def _check(self, slot: int, generation: int) -> str:
        held = self._slots.get(slot)
        if held is None or held[0] != generation:
            raise StaleSlot(f"slot {slot}: generation {generation} asked for, {held[0] if held else 'none'} held")
        return held[1]

    def _used(self) -> int:
        return sum(size for _, _, size in self._slots.values())


@dataclass(slots=True)
class _Row:
    tokens: list[int]  # known at the row's beginning
    block_ids: list[int]
    num_computed: int
    slot: int | None
    slot_generation: int
    digest: str
    last_token: int = -1  # sampled last
    block_ends: list[bytes] = field(default_factory=list)  # what the last position of each full block must hold


@dataclass(frozen=True, slots=True, kw_only=True)
class HashEngineFaults:
    """What a hash engine does wrong on purpose."""

    step_time_s: float = 0.0  # least time of a step
    crash_token: int | None = None  # feeding this token crashes the worker
    non_finite_token: int | None = None  # sampling this token fails the row instead
    on_crash: Callable[[], None] = lambda: None  # called before the crash is raised; a process may end itself here


class HashEngine:
    """Executes plans as data_plane.plan.Engine asks, checking all it can."""

    def __init__(self, capacities: Capacities, faults: HashEngineFaults | None = None) -> None:
        self.capacities = capacities
        self.faults = faults or HashEngineFaults()
        self.hash_slots = HashSlots(capacities.num_slots, capacities.arena_bytes)
        self.slots: AdapterSlots = self.hash_slots
        self.num_resets = 0
        self._blocks: list[list[bytes]] = []
        self._rows: dict[int, _Row] = {}
        self._decoding: set[int] = set()
        self._paused: set[int] = set()
        self._forget()

    def reset(self) -> None:
        """Forget everything."""
        self._forget()
        self.slots.clear()
        self.num_resets += 1

    def execute(self, plan: StepPlan) -> StepOutput:
        """One step of every decoding row and the prefills."""
        start_s = time.perf_counter()
        self._apply_differences(plan)
        rows = sorted(self._decoding)
        num_tokens = len(rows) + int(plan.prefills[:, 1].sum())
        if num_tokens > self.capacities.max_step_tokens:
            raise PlanRefused(f"{num_tokens} tokens in a step of at most {self.capacities.max_step_tokens}")
        tokens = [self._decode(self._rows[row], plan.step_id) for row in rows]
        for row_id, num_new in plan.prefills.tolist():
            token = self._prefill(row_id, num_new)
            if token is not None:
                rows.append(row_id)
                tokens.append(token)
        failed = [row for row, token in zip(rows, tokens, strict=True) if token == self.faults.non_finite_token]
        if failed:
            kept = [(row, token) for row, token in zip(rows, tokens, strict=True) if row not in failed]
            rows, tokens = [row for row, _ in kept], [token for _, token in kept]
        rest_s = self.faults.step_time_s - (time.perf_counter() - start_s)
        if rest_s > 0:
            time.sleep(rest_s)
        return StepOutput(
            plan.step_id, _int32(rows), _int32(tokens), _int32(failed), int((time.perf_counter() - start_s) * 1e6)
        )

    # ---- differences ----

    def _apply_differences(self, plan: StepPlan) -> None:
        for row_id in plan.freed_rows.tolist():
            self._free(row_id)
        for new in plan.new_rows:
            self._begin(new)
        for row_id, block_id in plan.appended_blocks.tolist():
            self._row(row_id).block_ids.append(self._fresh_block(block_id))
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
        for source, destination in plan.block_copies.tolist():
            self._blocks[destination] = list(self._blocks[source])

    def _begin(self, new: NewRow) -> None:
        if new.row in self._rows or not 0 <= new.row < self.capacities.max_rows:
            raise PlanRefused(f"row {new.row} begins and is in use or out of range")
        tokens, block_ids, num_computed = new.token_ids.tolist(), new.block_ids.tolist(), new.num_computed_tokens
        if not 0 <= num_computed < len(tokens) or len(tokens) > self.capacities.max_model_len:
            raise PlanRefused(f"row {new.row}: {num_computed} of {len(tokens)} tokens are computed")
        size = self.capacities.block_size
        if num_computed % size:
            raise PlanRefused(f"row {new.row}: {num_computed} computed tokens are no whole blocks of {size}")
        digest = "" if new.slot is None else self.hash_slots.digest_of(new.slot, new.slot_generation)
        row = _Row(tokens, block_ids, num_computed, new.slot, new.slot_generation, digest)
        num_shared = num_computed // size
        row.block_ends = [self._blocks[block_id][-1] for block_id in block_ids[:num_shared]]
        if row.block_ends != self._block_ends(row, num_shared):
            row.block_ends = [POISON] * num_shared  # a wrong prefix: every token from here on is wrong
        for block_id in block_ids[num_shared:]:
            self._fresh_block(block_id)
        self._rows[new.row] = row

    def _block_ends(self, row: _Row, num_blocks: int) -> list[bytes]:
        """What the first full blocks must hold at their ends, from the tokens alone."""
        value, ends = chain_start(self.capacities.model_fingerprint, row.digest), []
        size = self.capacities.block_size
        for start in range(0, num_blocks * size, size):
            for token in row.tokens[start : start + size]:
                value = chain_next(value, token)
            ends.append(value)
        return ends

    def _free(self, row_id: int) -> None:
        row = self._row(row_id)
        del self._rows[row_id]
        self._decoding.discard(row_id)
        self._paused.discard(row_id)
        # A block that is not full is nobody else's: whoever reads it from here on reads poison.
        first_partial = row.num_computed // self.capacities.block_size
        for block_id in row.block_ids[first_partial:]:
            self._fresh_block(block_id)

    def _fresh_block(self, block_id: int) -> int:
        if not 0 <= block_id < self.capacities.num_blocks:
            raise PlanRefused(f"block {block_id} is not one of {self.capacities.num_blocks}")
        self._blocks[block_id] = [POISON] * self.capacities.block_size
        return block_id

    # ---- the model ----

    def _decode(self, row: _Row, step_id: int) -> int:
        token = row.last_token
        value = self._advance(row, token)
        ends = row.block_ends
        if ends:  # one earlier block per step: attention reads them all
            index = step_id % len(ends)
            if self._blocks[row.block_ids[index]][-1] != ends[index]:
                value = POISON
        row.last_token = token_of(value, self.capacities.vocab_size)
        return row.last_token

    def _prefill(self, row_id: int, num_tokens: int) -> int | None:
        """Compute known tokens; the first sampled token if they were the last known ones."""
        row = self._row(row_id)
        end = row.num_computed + num_tokens
        if num_tokens < 1 or end > len(row.tokens) or row_id in self._decoding or row_id in self._paused:
            raise PlanRefused(f"row {row_id}: prefill of {num_tokens} tokens after {row.num_computed}")
        value = POISON
        for token in row.tokens[row.num_computed : end]:
            value = self._advance(row, token)
        if end < len(row.tokens):
            return None
        self._decoding.add(row_id)
        row.last_token = token_of(value, self.capacities.vocab_size)
        return row.last_token

    def _advance(self, row: _Row, token: int) -> bytes:
        """Feed one token: read the chain before it from the blocks, store the chain after it there."""
        if token == self.faults.crash_token:
            self.faults.on_crash()
            raise RuntimeError(f"crashed on token {token}")
        size, position = self.capacities.block_size, row.num_computed
        if position >= len(row.block_ids) * size:
            raise PlanRefused(f"position {position} lies beyond {len(row.block_ids)} blocks of {size}")
        digest = "" if row.slot is None else self.hash_slots.digest_of(row.slot, row.slot_generation)
        if position == 0:
            value = chain_start(self.capacities.model_fingerprint, digest)
        else:
            value = self._blocks[row.block_ids[(position - 1) // size]][(position - 1) % size]
        value = _sha256(value + token.to_bytes(4, "little")).digest()
        self._blocks[row.block_ids[position // size]][position % size] = value
        row.num_computed = position + 1
        if row.num_computed % size == 0:
            row.block_ends.append(value)
        return value

    def _row(self, row_id: int) -> _Row:
        row = self._rows.get(row_id)
        if row is None:
            raise PlanRefused(f"row {row_id} is not in use")
        return row

    def _forget(self) -> None:
        size = self.capacities.block_size
        self._blocks = [[POISON] * size for _ in range(self.capacities.num_blocks)]
        self._rows.clear()
        self._decoding.clear()
        self._paused.clear()


def _read_whole(digest: str, source: AdapterSource) -> int:
    """Arena bytes of the adapter, all of whose bytes were read and hashed. Raises AdapterCorrupt."""
    data, chunks = source.open(digest)
    if _sha256(data).hexdigest() != digest:
        raise AdapterCorrupt(f"adapter {digest}: its manifest hashes to {_sha256(data).hexdigest()}")
    manifest = json.loads(data)
    num_bytes = 0
    for entry, chunk in zip(manifest["chunks"], chunks, strict=True):
        if _sha256(chunk).hexdigest() != entry["sha256"]:
            raise AdapterCorrupt(f"adapter {digest}: chunk {entry['name']} is not what the manifest says")
        for module in entry["modules"]:
            width = module["in_features"] + module["out_features"]
            num_bytes += math.ceil(module["rank"] / 8) * 8 * width * _ITEM_BYTES[manifest["dtype"]]
    return num_bytes


def _int32(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)
