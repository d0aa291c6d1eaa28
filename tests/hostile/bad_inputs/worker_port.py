"""The worker port: Hello, every message that a worker may send, FetchAdapter. A worker is not trusted with our records.

A conversation is what a worker says after its Hello, given the epoch that it was welcomed with and, where the case
needs one, a plan: the plan of a request that no other worker of the corpus' server has rows for.
"""

from __future__ import annotations

import itertools
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc

from contract import PROTOCOL
from contract.v1 import plan_pb2 as pb
from tests.hostile.bad_inputs import generation, names
from tests.hostile.bad_inputs.case import INVALID, OK, TIMEOUT_S, Case, Outcome, short, wording_problems
from tests.hostile.bad_inputs.facts import BLOCK_SIZE, MAX_MODEL_LEN, MAX_ROWS, VOCAB_SIZE, Facts
from tests.hostile.bad_inputs.wire import chunk, nested

ATTACH = "/motet.worker.v1.WorkerService/Attach"
FETCH = "/motet.worker.v1.WorkerService/FetchAdapter"
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
ABORTED = grpc.StatusCode.ABORTED
U32, U64 = 2**32 - 1, 2**64 - 1
NUM_COMPLETIONS = MAX_ROWS + 1  # of the request whose plan a conversation gets: more rows than the other worker has
Build = Callable[[int, pb.StepPlan], list[pb.AttachRequest] | list[bytes]]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a worker says and what the control plane responds."""

    name: str
    hello: pb.Hello
    build: Build | None = None  # None: the Hello alone decides
    needs_plan: bool = False
    leaves: bool = True  # it says so before the end of its stream
    code: grpc.StatusCode = ABORTED
    says: str = ""

    @property
    def method(self) -> str:
        return ATTACH


def cases(facts: Facts) -> Iterator[Case]:
    """Calls that need no conversation."""
    hello = hello_of(facts, "first")
    for name, messages, says in (
        ("no message", (), "hello"),
        ("an empty message", (b"",), "hello"),
        ("a heartbeat first", (pb.AttachRequest(heartbeat=pb.Heartbeat()).SerializeToString(),), "hello"),
        ("a result first", (pb.AttachRequest(step_result=pb.StepResult(step_id=1)).SerializeToString(),), "hello"),
    ):
        yield Case(name=f"Attach: {name}", method=ATTACH, messages=messages, code=INVALID, says=says, has_details=False)
    for name, data in {
        "malformed protobuf": b"\x0a\xff\xff\xff\xff\x0f",
        "a worker_id that is not UTF-8": nested((1, 3), b"\xff\xfe"),
        "a device that is not UTF-8": hello.SerializeToString() + nested((1, 6), b"\xff"),
    }.items():
        yield Case(name=f"Attach: {name}", method=ATTACH, messages=(data,), fields=("request",))
    for digest in ["", *names.BAD_DIGESTS]:
        data = pb.FetchAdapterRequest(digest=digest, worker_id="w").SerializeToString()
        name = f"FetchAdapter: digest = {short(digest)}"
        yield Case(name=name, method=FETCH, messages=(data,), fields=("digest",))
    for worker_id in ("", "w", "x" * 100_000, "a\nb", "\x1b[31m", "é"):
        data = pb.FetchAdapterRequest(digest=names.UNKNOWN_DIGEST, worker_id=worker_id).SerializeToString()
        name = f"FetchAdapter: unknown digest, worker_id = {short(worker_id)}"
        yield Case(name=name, method=FETCH, messages=(data,), code=grpc.StatusCode.NOT_FOUND)
    for name, data in {"digest": nested((1,), b"\xff\xfe"), "worker_id": nested((2,), b"\xff")}.items():
        yield Case(name=f"FetchAdapter: {name} is not UTF-8", method=FETCH, messages=(data,), fields=("request",))


def hello_of(facts: Facts, worker_id: str, **changes: Any) -> pb.Hello:
    """A Hello that is taken."""
    fields: dict[str, Any] = {
        "protocol_min": PROTOCOL,
        "protocol_max": PROTOCOL,
        "worker_id": worker_id,
        "model_fingerprint": facts.fingerprint,
        "dtype": "float32",
        "device": "hostile",
        "num_blocks": 1024,
        "block_size": BLOCK_SIZE,
        "max_rows": 4 * NUM_COMPLETIONS,
        "max_step_tokens": 256,
        "arena_bytes": 1 << 30,
        "num_slots": 4,
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
    }
    return pb.Hello(**{**fields, **changes})


_numbers = itertools.count()


def conversations(facts: Facts) -> Iterator[Conversation]:
    """All of them, each by a worker of a name that none had before: one that sends garbage is kept out for a while."""
    for conversation in _conversations(facts):
        if conversation.hello.worker_id == "any":
            conversation.hello.worker_id = f"hostile-{next(_numbers)}"
        yield conversation


def _conversations(facts: Facts) -> Iterator[Conversation]:
    yield from _hellos(facts)
    yield from _without_plan(facts)
    yield from _results(facts)


def _hellos(facts: Facts) -> Iterator[Conversation]:
    def refused(code: grpc.StatusCode, says: str, **changes: Any) -> Conversation:
        worker_id = changes.pop("worker_id", "any")
        what = ", ".join(f"{name} = {short(value)}" for name, value in {"worker_id": worker_id, **changes}.items())
        return Conversation(name=f"Hello: {what}", hello=hello_of(facts, worker_id, **changes), code=code, says=says)

    bad_ids = ["", "A", "a b", "a/b", "a\nb", "\0", "\x1b[31m", "é", "\uff41", "a\u202e", "x" * 64, "x" * 100_000]
    yield from (refused(INVALID, "hello.worker_id", worker_id=worker_id) for worker_id in bad_ids)
    bounds: dict[str, list[int]] = {
        "num_blocks": [0, (1 << 24) + 1, U32],
        **{name: [0, (1 << 16) + 1, U32] for name in ("block_size", "max_rows", "num_slots")},
        "max_step_tokens": [0, (1 << 20) + 1, U32],
        "arena_bytes": [(1 << 50) + 1, U64],
        "max_model_len": [0, 1, 2**31, U32],
        "max_adapter_model_len": [2**31, U32],
        "vocab_size": [0, 2**31, U32],
        "num_host_blocks": [(1 << 21) + 1, U32],
        "hidden_width": [(1 << 20) + 1, U32],
    }
    bad_devices = ["x" * 129, "x" * 100_000, "\x1b[2Jcpu", "cpu\nERROR forged", "\0"]
    yield from (refused(INVALID, "hello.device", device=device) for device in bad_devices)
    for field, values in bounds.items():
        yield from (refused(INVALID, f"hello.{field}", **{field: value}) for value in values)
    for part in pb.MemoryUse.DESCRIPTOR.fields:
        yield refused(INVALID, f"hello.memory.{part.name}", memory=pb.MemoryUse(**{part.name: U64}))
    yield from (refused(PRECONDITION, "--quantization", quantization=way) for way in ("fp8", "FP8", "x" * 100_000))
    yield from (refused(PRECONDITION, str(VOCAB_SIZE), vocab_size=size) for size in (1, VOCAB_SIZE - 1, VOCAB_SIZE + 1))
    for lowest, highest in (
        (0, 0),
        (PROTOCOL - 1, PROTOCOL - 1),
        (PROTOCOL + 1, PROTOCOL + 2),
        (PROTOCOL + 1, PROTOCOL),
        (PROTOCOL, PROTOCOL - 1),
        (U32, U32),
    ):
        yield refused(PRECONDITION, "protocol", protocol_min=lowest, protocol_max=highest)
    fingerprints = ["", "0" * 64, facts.fingerprint.upper(), facts.fingerprint[:-1], "\0", "é", "x" * 100_000]
    yield from (refused(PRECONDITION, "checkpoint", model_fingerprint=value) for value in fingerprints)
    for dtype in ("", "float64", "FLOAT32", "float32\0", "bfloat16", "x" * 100_000):
        yield refused(PRECONDITION, "--dtype", dtype=dtype)
    for last_epoch in (2**63, U64):
        yield refused(PRECONDITION, "restart the worker", last_epoch=last_epoch)

    sizes = {"in_features": 4, "out_features": 4}
    entry: dict[str, Any] = {"path": "a.*.b", "layers": b"\0\0\0\0", "kind": 1, "reason": "no"} | sizes
    bad_entries: dict[str, list[Any]] = {
        "path": ["", "*", "a..b", "a b", "a\n", "é", "../../etc", "a.*.b.*", "a" * 100_000],
        "layers": [b"", b"\0", b"\xff" * 4, b"\0" * 8, b"\1\0\0\0" * 2, b"\0" * 1_000_000],
        "kind": [0, 99, 2**31 - 1],
        "num_experts": [1, U32],
        "in_features": [0, 2**31, U32],
        "out_features": [0, 2**31, U32],
        "reason": ["\n", "\x1b[31m", "é", "x" * 201, "x" * 100_000],
    }
    for field, values in bad_entries.items():
        for value in values:
            # A path without a place for the layer makes the layers wrong.
            says = "hello.target_modules[1].layers" if str(value) == "a.*.b.*" else f"hello.target_modules[1].{field}"
            bad = pb.TargetModules(**{**entry, field: value})
            conversation = refused(INVALID, says, target_modules=[pb.TargetModules(**entry), bad])
            yield replace(conversation, name=f"Hello: target_modules[1].{field} = {short(value)}")
    yield refused(INVALID, "at most 4096", target_modules=[pb.TargetModules(**entry)] * 4097)

    def taken(name: str, **changes: Any) -> Conversation:
        hello = hello_of(facts, "any", **changes)
        return Conversation(name=f"Hello: {name}", hello=hello, build=lambda *_: [], code=OK)

    yield taken("as it should be")
    yield taken("all protocols", protocol_min=0, protocol_max=U32)
    yield taken("one block, one row", num_blocks=1, block_size=1, max_rows=1, max_step_tokens=1, num_slots=1)
    most = {"num_blocks": 1 << 24, "num_host_blocks": 1 << 21, "max_rows": 1 << 16, "num_slots": 1 << 16}
    yield taken("as much as may be claimed", device="x" * 128, max_step_tokens=1 << 20, **most)
    yield taken("no arena", arena_bytes=0)
    yield taken("an arena at the limit", arena_bytes=1 << 50)
    yield taken("a device in any language", device="GPU d’Émile, 显卡")
    yield taken("ranks", parallel=pb.ParallelLayout(tensor=U32, pipeline=U32))


def _without_plan(facts: Facts) -> Iterator[Conversation]:
    """After the Hello, with nothing to do."""
    hello = hello_of(facts, "any")

    def said(name: str, build: Build, code: grpc.StatusCode = ABORTED, says: str = "") -> Conversation:
        copy = pb.Hello()
        copy.CopyFrom(hello)
        return Conversation(name=name, hello=copy, build=build, code=code, says=says)

    def one(**message: Any) -> Build:
        return lambda *_: [pb.AttachRequest(**message)]

    def one_of_epoch(message: pb.StepResult | pb.SlotState) -> Build:
        """The message with the connection's own epoch."""
        if isinstance(message, pb.StepResult):
            return lambda epoch, _: [_result(epoch, message)]
        return lambda epoch, _: [_slot_state(epoch, message)]

    yield said("a second Hello", one(hello=hello), says="hello")
    yield said("an empty message", one())
    for sequence in (0, 2, 3, U64):
        yield said(f"pong {sequence}", one(pong=pb.Pong(sequence=sequence)), says="pong")
    for step_id in (1, 2, U64):
        result = pb.StepResult(step_id=step_id)
        yield said(f"result {step_id} of no plan", one_of_epoch(result), says="step")
        yield said(f"result {step_id} of another epoch", one(step_result=result), OK)
    slot_states: dict[str, dict[str, Any]] = {
        "of a slot that nothing was loaded into": {"slot": 0, "generation": 1, "state": 1},
        "of a slot that is not there": {"slot": U32, "generation": 1, "state": 1},
        "of generation 2^32 - 1": {"slot": 0, "generation": U32, "state": 1},
        "empty, of an empty slot": {"slot": 0, "generation": 1, "state": 2},
        "failed, of an empty slot": {"slot": 0, "generation": 1, "state": 3, "reason": "x" * 100_000},
        "without a state": {"slot": 0, "generation": 1},
        "of a state that is not known": {"slot": 0, "generation": 1, "state": 77},
    }
    for name, fields in slot_states.items():
        state = pb.SlotState(**fields)
        yield said(f"a slot state {name}", one_of_epoch(state))
        yield said(f"a slot state {name}, of another epoch", one(slot_state=state), OK)
    beat = pb.Heartbeat(num_steps=U64, num_plans_waiting=U32, arena_used_bytes=U64, resident_bytes=U64)
    yield said("a heartbeat of the largest numbers", one(heartbeat=beat), OK)
    yield said("1000 heartbeats", lambda *_: [pb.AttachRequest(heartbeat=beat)] * 1000, OK)
    yield said("an unknown message", lambda *_: [chunk(77, b"x")])
    for reason in ("", "x" * 100_000, "\x1b[31m\n\0é"):
        fault = pb.Fault(reason=reason, step_id=U64)
        yield said(f"a fault {short(reason)}", one(fault=fault), OK)
        yield said(f"it leaves: {short(reason)}", one(leave=pb.Leave(reason=reason)), OK)
    last = [pb.AttachRequest(leave=pb.Leave()), pb.AttachRequest(pong=pb.Pong(sequence=U64))]
    yield said("garbage after it left", lambda *_: last, OK)
    silent = said("the end without a word", lambda *_: [], grpc.StatusCode.UNAVAILABLE, "without a leave")
    yield replace(silent, leaves=False)


def _results(facts: Facts) -> Iterator[Conversation]:
    """Results of a plan that samples one row, whose request wants two candidates."""

    def result(name: str, says: str = "", code: grpc.StatusCode = ABORTED, **changes: Any) -> Conversation:
        def build(epoch: int, plan: pb.StepPlan) -> list[pb.AttachRequest]:
            return [_result(epoch, _step_result(plan, **changes))]

        return Conversation(
            name=f"result: {name}",
            hello=hello_of(facts, "any"),
            build=build,
            needs_plan=True,
            code=code,
            says=says,
        )

    yield result("of step 2", "step 2", step_id=2)
    yield result("of step 2^64 - 1", "step", step_id=U64)
    yield result("without rows", "rows", rows=b"", token_ids=b"", sampled_logprobs=[])
    yield result("of another row", "rows", rows=_packed(7))
    yield result("of a row twice", "rows", rows=_packed(0, 0), token_ids=_packed(1, 1))
    yield result("of row -1", "rows", rows=_packed(-1))
    yield result("of three bytes of rows", "", rows=b"abc", token_ids=b"abc")
    yield result("of more tokens than rows", "", token_ids=_packed(1, 2))
    yield result("without tokens", "", token_ids=b"")
    yield result("of a token above the vocabulary", str(VOCAB_SIZE - 1), token_ids=_packed(VOCAB_SIZE))
    yield result("of token -1", str(VOCAB_SIZE - 1), token_ids=_packed(-1))
    yield result("of token 2^31 - 1", str(VOCAB_SIZE - 1), token_ids=_packed(2**31 - 1))
    yield result("with a failed row that did not run", "row 9", failed_rows=_packed(9))
    yield result("with a failed row twice", "row", failed_rows=_packed(0, 0), rows=b"", token_ids=b"")
    yield result("with three bytes of failed rows", "", failed_rows=b"abc")
    yield result("with a row whose constraint failed and that did not", "", unconstrained_rows=_packed(0))
    yield result("with three bytes of rows whose constraint failed", "3 bytes", unconstrained_rows=b"abc")
    yield result(
        "with a row that waits and has no constraint", "row 0", waiting_rows=_packed(0), rows=b"", token_ids=b""
    )
    yield result("with three bytes of rows that wait", "3 bytes", waiting_rows=b"abc")
    for name, entry in {
        "of another row": _logprobs(row=5),
        "of row 2^32 - 1": _logprobs(row=U32),
        "with one candidate": _logprobs(num_top=1, top_token_ids=_packed(1), top_logprobs=_floats(-1.0)),
        "with 2^32 - 1 candidates": _logprobs(num_top=U32),
        "of no token": _logprobs(token_ids=b"", logprobs=b"", ranks=b"", top_token_ids=b"", top_logprobs=b""),
        "with three bytes": _logprobs(logprobs=b"abc"),
        "with NaN": _logprobs(logprobs=_floats(float("nan"))),
        "with infinity": _logprobs(top_logprobs=_floats(float("inf"), -1.0)),
        "with -infinity": _logprobs(logprobs=_floats(float("-inf"))),
        "of a token above the vocabulary": _logprobs(token_ids=_packed(VOCAB_SIZE)),
        "with a candidate above the vocabulary": _logprobs(top_token_ids=_packed(1, VOCAB_SIZE)),
        "with a candidate below zero": _logprobs(top_token_ids=_packed(1, -1)),
        "with rank 0": _logprobs(ranks=_packed(0)),
        "with a rank below zero": _logprobs(ranks=_packed(-1)),
        "with a rank above the vocabulary": _logprobs(ranks=_packed(VOCAB_SIZE + 1)),
        "of another token than was sampled": _logprobs(token_ids=_packed(2)),
        "of another place": _logprobs(first_position=1),
        "of place 2^32 - 1": _logprobs(first_position=U32),
        "with nothing at all": pb.RowLogprobs(),
    }.items():
        yield result(f"log-probabilities {name}", "", sampled_logprobs=[entry])
    yield result("prompt log-probabilities that nobody requested", "row 0", prompt_logprobs=[_logprobs()])
    yield result("a vector that nobody requested", "vectors", pooled=[pb.PooledRow(row=1, values=_floats(1.0))])
    yield result("as it should be", code=OK)
    yield result("with a time of 2^64 - 1", code=OK, step_time_us=U64, move_time_us=U64, num_moved_blocks=U32)


def _step_result(plan: pb.StepPlan, **changes: Any) -> pb.StepResult:
    fields: dict[str, Any] = {
        "step_id": plan.step_id,
        "rows": _packed(0),
        "token_ids": _packed(1),
        "sampled_logprobs": [_logprobs()],
        "step_time_us": 1000,
    }
    result = pb.StepResult(**{**fields, **changes})
    for entry in result.sampled_logprobs if plan.new_rows else ():
        if not entry.first_position:  # behind the tokens that the row begins with
            entry.first_position = len(plan.new_rows[0].token_ids) // 4
    return result


def _logprobs(**changes: Any) -> pb.RowLogprobs:
    fields: dict[str, Any] = {
        "row": 0,
        "token_ids": _packed(1),
        "logprobs": _floats(-0.5),
        "ranks": _packed(1),
        "num_top": 2,
        "top_token_ids": _packed(1, 2),
        "top_logprobs": _floats(-0.5, -1.0),
    }
    return pb.RowLogprobs(**{**fields, **changes})


def _packed(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _result(epoch: int, result: pb.StepResult) -> pb.AttachRequest:
    message = pb.AttachRequest(step_result=result)
    message.step_result.epoch = epoch
    return message


def _slot_state(epoch: int, state: pb.SlotState) -> pb.AttachRequest:
    message = pb.AttachRequest(slot_state=state)
    message.slot_state.epoch = epoch
    return message


class Worker:
    """The worker's end of one plan stream, written by hand."""

    def __init__(self, channel: grpc.Channel, timeout_s: float = TIMEOUT_S) -> None:
        self._outgoing: queue.Queue[bytes | None] = queue.Queue()
        raw: Any = channel  # the stubs demand serializers; these messages are bytes
        self._call = raw.stream_stream(ATTACH)(iter(self._outgoing.get, None), timeout=timeout_s)

    def say(self, message: pb.AttachRequest | bytes) -> None:
        self._outgoing.put(message if isinstance(message, bytes) else message.SerializeToString())

    def hear(self, kind: str) -> Any:
        """The next message of a kind; others are passed over. Raises grpc.RpcError, StopIteration."""
        while True:
            message = pb.AttachResponse.FromString(next(self._call))
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)

    def end(self) -> Outcome:
        """Say no more, and wait for the end of the stream."""
        self._outgoing.put(None)
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            return Outcome(self._call.code(), self._call.details() or "")
        return Outcome(OK)

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()


def converse(
    worker_channel: grpc.Channel, client_channel: grpc.Channel, conversation: Conversation, timeout_s: float = TIMEOUT_S
) -> Outcome:
    """How the plan stream of one conversation ends."""
    worker = Worker(worker_channel, timeout_s)
    open_request: _OpenRequest | None = None
    try:
        worker.say(pb.AttachRequest(hello=conversation.hello))
        if conversation.build is None:
            return worker.end()
        epoch = worker.hear("welcome").epoch
        plan = pb.StepPlan()
        if conversation.needs_plan:
            open_request, plan = _OpenRequest(client_channel, timeout_s), worker.hear("step_plan")
        for message in conversation.build(epoch, plan):
            worker.say(message)
        if conversation.leaves:
            worker.say(pb.AttachRequest(leave=pb.Leave(reason="the conversation is over")))
        return worker.end()
    except grpc.RpcError:
        return worker.end()
    finally:
        worker.close()
        if open_request is not None:
            open_request.cancel()


class _OpenRequest:
    """A request for more completions than the other worker has rows, until it is cancelled."""

    def __init__(self, channel: grpc.Channel, timeout_s: float) -> None:
        request = generation.request(decoding__n=NUM_COMPLETIONS, sampling__logprobs=2).SerializeToString()
        self._call = cast("Any", channel).unary_stream(generation.GENERATE)(request, timeout=timeout_s)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._call.cancel()
        self._thread.join()

    def _read(self) -> None:
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            pass  # it has no worker any more, or was cancelled


def problems(conversation: Conversation, outcome: Outcome) -> list[str]:
    """What is wrong with the end of a plan stream."""
    if outcome.code is not conversation.code:
        return [f"{outcome.code.name} where {conversation.code.name} is due: {outcome.message}"]
    found = wording_problems(outcome)
    if conversation.says not in outcome.message:
        found.append(f"the message does not say {conversation.says!r}: {outcome.message}")
    return found
