"""A worker in memory that executes step plans with a hash chain instead of a model, for scheduler tests.

The chain value after each token is stored in the KV block the plan gives, the adapter's digest is read from the slot
the plan names: a stale block, a wrong slot, a lost or doubled token becomes a wrong token. Tables, rows and slots are
checked as strictly as a real worker does.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from control_plane.scheduler.types import (
    Combination,
    EvictSlot,
    LoadSlot,
    NewRow,
    Pooling,
    Request,
    Sampling,
    SlotCommand,
    SlotUse,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Vector,
    WorkerLimits,
    sample_seed,
)

VOCAB_SIZE = 50
WIDTH = 4  # of a vector
POISON = b"freed"


def chain_start(digest: str | None) -> bytes:
    """h0 = SHA256(base, adapter digest)."""
    return hashlib.sha256(b"base" + (digest or "").encode()).digest()


def uses_of(uses: Iterable[tuple[str, float]], *, is_linear: bool) -> str:
    """Adapters that are combined or scaled, as one name: digests with their scales."""
    return ("linear " if is_linear else "cat ") + " ".join(f"{digest}*{scale}" for digest, scale in uses)


def chain_step(value: bytes, token_id: int) -> bytes:
    """h' = SHA256(h, token)."""
    return hashlib.sha256(value + token_id.to_bytes(4, "little")).digest()


def token_of(value: bytes) -> int:
    """The token that follows."""
    return int.from_bytes(value[:4], "little") % VOCAB_SIZE


def sampled_token(value: bytes, sampling: Sampling, banned: Collection[int]) -> int:
    """The token that a row samples: by its seed unless it is greedy, and none that is banned."""
    if sampling.temperature > 0:
        value = hashlib.sha256(value + sampling.seed.to_bytes(8, "little")).digest()
    token_id = token_of(value)
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


@functools.lru_cache(maxsize=4096)  # requested by the worker, and by those who check it
def ranked_distribution(value: bytes) -> tuple[list[float], list[int]]:
    """Log-probabilities of all tokens, and the tokens from the most likely on."""
    logprobs = distribution(value)
    return logprobs, sorted(range(VOCAB_SIZE), key=lambda token: -logprobs[token])


def distribution(value: bytes) -> list[float]:
    """Log-probabilities of all tokens, for those that ask: no two alike, and nothing to do with what is sampled."""
    drawn = memoryview(hashlib.shake_128(value).digest(4 * VOCAB_SIZE)).cast("I")
    weights = [(number | 63) ^ token_id for token_id, number in enumerate(drawn)]  # the token id in the last six bits
    total = sum(weights)
    return [math.log(weight / total) for weight in weights]


def logprobs_of(value: bytes, token_id: int, num_top: int) -> TokenLogprobs:
    """What is returned of a token that follows."""
    logprobs, ranked = ranked_distribution(value)
    top = tuple((token, logprobs[token]) for token in ranked[:num_top])
    return TokenLogprobs(token_id, logprobs[token_id], ranked.index(token_id) + 1, top)


def chain_of(request: Request, token_ids: Iterable[int]) -> bytes:
    """The chain's value after these tokens under the request's adapter."""
    digest = request.adapter.digest if request.adapter else None
    if request.composition is not None:
        uses = ((use.ref.digest, use.scale) for use in request.composition.uses)
        digest = uses_of(uses, is_linear=request.composition.combination is Combination.LINEAR)
    value = chain_start(None if request.active_from else digest)
    for position, token_id in enumerate(token_ids):
        if position and position == request.active_from:
            value = activated(value, digest)
        value = chain_step(value, token_id)
    return value


def vector_of(value: bytes, pooling: Pooling) -> Vector:
    """What is returned of a request that does not generate: it follows from all its tokens and from what it pools."""
    words = f"{pooling.kind.value} {pooling.num_labels}".encode()
    drawn = np.frombuffer(hashlib.sha256(value + words).digest(), dtype=np.uint8)
    return drawn[: pooling.num_labels or WIDTH].astype(np.float32)


def activated(value: bytes, digest: str | None) -> bytes:
    """The chain's value from which an adapter acts that did not act before."""
    return hashlib.sha256(value + b"active" + (digest or "").encode()).digest()


def oracle(request: Request, max_model_len: int, index: int = 0) -> list[int]:
    """All tokens of one completion to the request when nothing disturbs it."""
    sampling = replace(request.sampling, seed=sample_seed(request.sampling.seed, index))
    value = chain_of(request, request.prompt_token_ids)
    tokens: list[int] = []
    limit = min(request.max_tokens, max_model_len - len(request.prompt_token_ids))
    while len(tokens) < limit:
        banned = request.stop_token_ids if len(tokens) < sampling.min_tokens else ()
        tokens.append(sampled_token(value, sampling, banned))
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
    num_prompt: int
    sampling: Sampling
    banned_token_ids: tuple[int, ...]
    is_host_fed: bool
    adapters: tuple[SlotUse, ...]
    is_linear: bool
    active_from: int
    pooling: Pooling | None
    is_decoding: bool = False


def steps_of(plan: StepPlan) -> list[StepPlan]:
    """A plan of several steps as plans of one."""
    if plan.num_steps == 1:
        return [plan]
    first = replace(plan, num_steps=1)
    return [first, *(StepPlan(plan.step_id + idx, plan.decode_rows) for idx in range(1, plan.num_steps))]


class ModelWorker:
    """Executes plans of one step in order."""

    def __init__(self, limits: WorkerLimits, *, waits: Callable[[], bool] = lambda: False) -> None:
        """`waits`: whether a row that could sample sits out the step, as one does whose mask is not ready."""
        self.limits = limits
        self._waits = waits
        self.kv: list[list[bytes]] = [[POISON] * limits.block_size for _ in range(limits.num_blocks)]
        self.rows: dict[int, Row] = {}
        self.slots: dict[int, tuple[int, str]] = {}  # slot -> (generation, digest)
        self.host_kv: dict[int, list[bytes]] = {}
        self.num_steps = 0
        self.num_waits = 0  # rows that sat out a step

    def obey(self, command: SlotCommand) -> None:
        """Fill or empty a slot."""
        if isinstance(command, LoadSlot):
            assert command.slot_idx not in self.slots, f"slot {command.slot_idx} is loaded but not empty"
            self.slots[command.slot_idx] = (command.generation, command.digest)
        elif isinstance(command, EvictSlot):
            assert self.slots[command.slot_idx] == (command.generation, command.digest), "another adapter is evicted"
            del self.slots[command.slot_idx]

    def poison(self, block_ids: list[int]) -> None:
        """Make blocks that nobody should read any more unreadable."""
        for block_id in block_ids:
            self.kv[block_id] = [POISON] * self.limits.block_size

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the differences, compute, sample."""
        assert plan.num_steps == 1, "steps_of was not requested"
        assert plan.step_id == self.num_steps + 1, "steps come out of order"
        self.num_steps += 1
        for freed in plan.freed_rows:
            del self.rows[freed]
        for new in plan.new_rows:
            self._begin(new)
        for row_idx, block_id in plan.appended_blocks:
            self.rows[row_idx].block_ids.append(block_id)
        for row_idx, token_id in plan.fed_tokens:
            assert self.rows[row_idx].is_host_fed, f"row {row_idx} is fed and feeds itself"
            self.rows[row_idx].token_ids[-1] = token_id
        self._move(plan)
        for source, destination in plan.block_copies:
            self.kv[destination] = list(self.kv[source])
        for new in plan.new_rows:
            self._check_prefix(self.rows[new.row])
        fed = {row_idx for row_idx, _ in plan.fed_tokens}
        host_fed = {row_idx for row_idx in plan.decode_rows if self.rows[row_idx].is_host_fed}
        assert fed == host_fed, "rows that decode host_fed are those that are fed"
        scheduled = [*((row_idx, 1, True) for row_idx in plan.decode_rows), *((*item, False) for item in plan.prefills)]
        assert sum(num_tokens for _, num_tokens, _ in scheduled) <= self.limits.max_step_tokens
        assert len({row_idx for row_idx, _, _ in scheduled}) == len(scheduled)
        assert plan.decode_rows == sorted(plan.decode_rows)
        result = StepResult(plan.step_id, [], [])
        waiting: set[int] = set()
        for row_idx, num_tokens, is_decode in scheduled:
            row = self.rows[row_idx]
            assert is_decode == row.is_decoding, "decode and prefill are confused"
            assert not (is_decode and row.pooling is not None), "a row that pools decodes"
            value, returned = self._compute(num_tokens, row)
            if returned:
                result.prompt_logprobs[row_idx] = returned
            if row.num_computed < row.num_known:
                continue
            row.is_decoding = True
            if not row.is_host_fed and row.pooling is None and self._waits():
                row.num_computed -= 1
                waiting.add(row_idx)
                self.num_waits += 1
                continue
            if row.pooling is not None:
                result.pooled[row_idx] = vector_of(value, row.pooling)
            is_short = len(row.token_ids) - row.num_prompt < row.sampling.min_tokens
            token_id = sampled_token(value, row.sampling, row.banned_token_ids if is_short else ())
            row.token_ids.append(token_id)
            result.rows.append(row_idx)
            result.token_ids.append(token_id)
            if row.sampling.num_logprobs is not None:
                result.logprobs[row_idx] = logprobs_of(value, token_id, row.sampling.num_logprobs)
        return replace(result, waiting_rows=frozenset(waiting)) if waiting else result

    def _begin(self, new: NewRow) -> None:
        assert new.row not in self.rows, f"row {new.row} begins but is taken"
        assert new.num_computed_tokens < new.num_tokens, "nothing is left to compute"
        reads_all = new.pooling is not None and new.pooling.reads_all
        assert not (reads_all and new.num_computed_tokens), "states that the row pools are not computed in it"
        self.rows[new.row] = Row(
            token_ids=new.token_ids,
            num_known=new.num_tokens,
            num_computed=new.num_computed_tokens,
            block_ids=list(new.block_ids),
            slot=new.slot_idx,
            slot_generation=new.slot_generation,
            num_prompt=len(new.prompt_token_ids),
            sampling=new.sampling,
            banned_token_ids=new.banned_token_ids,
            is_host_fed=new.is_host_fed,
            adapters=new.adapters,
            is_linear=new.is_linear,
            active_from=new.active_from,
            pooling=new.pooling,
        )

    def _move(self, plan: StepPlan) -> None:
        """Move blocks to host memory, then blocks back."""
        assert len({host for _, host in plan.swap_outs}) == len(plan.swap_outs), "two blocks go to one host block"
        assert len({block for _, block in plan.swap_ins}) == len(plan.swap_ins), "two host blocks go to one block"
        for block_id, host_block in plan.swap_outs:
            self.host_kv[host_block] = list(self.kv[block_id])
        for host_block, block_id in plan.swap_ins:
            self.kv[block_id] = self.host_kv.pop(host_block)

    def _digest(self, row: Row) -> str | None:
        if row.slot is None:
            return None
        digest = self._digest_in(row.slot, row.slot_generation)
        if not row.adapters:
            return digest
        uses = [(self._digest_in(use.slot_idx, use.generation), use.scale) for use in row.adapters]
        assert uses[0][0] == digest, "the first of a row's adapters is in another slot"
        return uses_of(uses, is_linear=row.is_linear)

    def _digest_in(self, slot_idx: int, named: int) -> str:
        generation, digest = self.slots[slot_idx]
        assert generation == named, "the slot holds another generation"
        return digest

    def _step(self, value: bytes, row: Row, position: int) -> bytes:
        """The chain's value after the row's token at this position."""
        if position and position == row.active_from:
            value = activated(value, self._digest(row))
        return chain_step(value, row.token_ids[position])

    def _chain_start(self, row: Row) -> bytes:
        digest = self._digest(row)  # looked up in any case: all slots must be right
        return chain_start(None if row.active_from else digest)

    def _check_prefix(self, row: Row) -> None:
        """What a row begins with must be in its blocks: attention reads all of it."""
        size, value = self.limits.block_size, self._chain_start(row)
        for position in range(row.num_computed):
            value = self._step(value, row, position)
            assert self.kv[row.block_ids[position // size]][position % size] == value, "a row begins on other tokens"

    def _compute(self, num_tokens: int, row: Row) -> tuple[bytes, list[TokenLogprobs]]:
        """Feed the row's next tokens; the chain's value after the last, and what is returned of the prompt's tokens."""
        size = self.limits.block_size
        value = self._chain_start(row)
        if row.num_computed:
            last = row.num_computed - 1
            value = self.kv[row.block_ids[last // size]][last % size]
        returned: list[TokenLogprobs] = []
        for position in range(row.num_computed, row.num_computed + num_tokens):
            value = self._step(value, row, position)
            self.kv[row.block_ids[position // size]][position % size] = value
            if row.sampling.num_prompt_logprobs is not None and position + 1 < row.num_prompt:
                returned.append(logprobs_of(value, row.token_ids[position + 1], row.sampling.num_prompt_logprobs))
        row.num_computed += num_tokens
        assert row.num_computed <= len(row.token_ids), "a row skipped a token"
        return value, returned
