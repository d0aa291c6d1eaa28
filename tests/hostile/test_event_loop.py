"""Nothing that a client sends, bad or good, holds up the control plane's event loop.

Two seconds of a busy loop make every worker leave. The limit is far below: CPU time, so that a busy machine does not
matter, in a control plane built as in production.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from motet.v1 import adapters_pb2, adapters_pb2_grpc, generation_pb2, generation_pb2_grpc, status_pb2, status_pb2_grpc
from tokenizers import Tokenizer

from tests.e2e.harness import System
from tests.fakes.loop_monitor import LoopReport
from tests.fakes.watched_control_plane import command, take_report
from tests.hostile.bad_inputs import large, mutations, worker_port
from tests.hostile.bad_inputs.case import Case, send
from tests.hostile.bad_inputs.corpus import CLIENT_TABLES, GOOD_ADAPTER, Target
from tests.hostile.bad_inputs.facts import ROOT_NAME
from tests.hostile.bad_inputs.other_calls import UNARY
from tests.makers import make_checkpoint, make_tokenizer

MAX_TURN_MS = 50.0
# A call that keeps the interpreter's lock in another thread. The measure is coarser: it counts all threads, and the
# kernel may leave the one that requests the lock waiting while they run.
MAX_LOCK_MS = 150.0
NUM_REPEATS = 3
NUM_ADAPTERS = 120  # registered in one check, and deleted in as many parts as it may have repeats
TIMEOUT_S = 120.0
CONTEXT = 131_072


def check(system: System, what: str, call: Callable[[], object], *, allowed_ms: float = 0.0) -> None:
    """`call` does not hold up the loop. What holds it up does so each time; what the machine adds comes once.

    `allowed_ms`: what protobuf needs to read the messages sent.
    """
    report = system.work_dir / "report"
    take_report(system.control_plane, report)
    for _ in range(NUM_REPEATS):
        call()
        problems = held_up(take_report(system.control_plane, report), MAX_TURN_MS + allowed_ms)
        if not problems:
            return
    pytest.fail(f"{what}: {problems}, the last time of {NUM_REPEATS}")


def held_up(found: LoopReport, limit_ms: float) -> str:
    """What exceeds its limit; empty: nothing."""
    if found.longest_turn_ms > limit_ms:
        worst = "\n".join(f"{ms} ms: {name[:300]}" for ms, name in found.slowest)
        return f"a turn of {found.longest_turn_ms} ms of {limit_ms}\n{worst}"
    if found.longest_lock_ms > MAX_LOCK_MS:
        return f"the lock was held for {found.longest_lock_ms} ms of {MAX_LOCK_MS}"
    return ""


# ---- what is refused ----


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("watched")
    with Target(directory, control_command=command(directory / "system" / "report")) as target:
        yield target


def test_no_bad_input_holds_up_the_loop(target: Target) -> None:
    facts = target.facts

    def send_all(channel: grpc.Channel, cases: Callable[[], Iterator[Case]]) -> None:
        for case in cases():
            send(channel, case)

    def converse_all() -> None:
        for conversation in worker_port.conversations(facts):
            worker_port.converse(target.worker_channel, target.client_channel, conversation)

    for name, table in CLIENT_TABLES.items():
        check(target.system, name, partial(send_all, target.client_channel, partial(table, facts)))
    check(target.system, "the worker port", partial(send_all, target.worker_channel, partial(worker_port.cases, facts)))
    check(target.system, "conversations of workers", converse_all)
    mutated = partial(mutations.cases, facts, seed=1, count=100)
    check(target.system, "mutated messages", partial(send_all, target.client_channel, mutated))


def test_no_field_filled_to_the_largest_message_holds_up_the_loop(target: Target) -> None:
    def send_one(case: Case) -> None:
        problems = mutations.problems(send(target.client_channel, case), target.facts.secrets)
        assert not problems, f"{case.name}: {problems}"

    for case in large.cases():
        # Twice what it takes here: the server's memory is fragmented, this one's is fresh.
        check(target.system, case.name, partial(send_one, case), allowed_ms=2 * reading_ms(case))


def reading_ms(case: Case) -> float:
    """CPU time of protobuf to read the case's messages: no server that takes them can need less."""
    kind = UNARY.get(case.method, adapters_pb2.UploadAdapterRequest)
    began_s = time.thread_time()
    for message in case.messages:
        kind.FromString(message)
    return (time.thread_time() - began_s) * 1e3


# ---- what is answered ----


def test_no_call_of_the_admin_services_holds_up_the_loop(target: Target) -> None:
    channel = target.client_channel
    adapters: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
    operations, status = operations_pb2_grpc.OperationsStub(channel), status_pb2_grpc.StatusServiceStub(channel)
    health: Any = health_pb2_grpc.HealthStub(channel)
    labels = {f"label-{number:02d}": "v" * 256 for number in range(64)}
    created, numbers = list[str](), itertools.count()

    def ended(operation: Any) -> None:
        request = operations_pb2.WaitOperationRequest(name=operation.name)
        assert operations.WaitOperation(request, timeout=TIMEOUT_S).WhichOneof("result") == "response"

    def create() -> None:
        for _ in range(NUM_ADAPTERS):
            name = f"labelled-{len(created):03d}"
            request = adapters_pb2.CreateAdapterRequest(adapter_id=name, source=f"{ROOT_NAME}/good", labels=labels)
            ended(adapters.CreateAdapter(request, timeout=TIMEOUT_S))
            created.append(name)

    def upload() -> None:
        for case in CLIENT_TABLES["uploads"](target.facts):
            if case.code is grpc.StatusCode.OK:
                send(channel, case)

    def list_adapters() -> None:
        listed: list[adapters_pb2.Adapter] = []
        token = ""
        while not listed or token:
            page = adapters.ListAdapters(adapters_pb2.ListAdaptersRequest(page_size=1000, page_token=token))
            listed, token = [*listed, *page.adapters], page.next_page_token
        assert len(listed) == len(created) + 1

    def list_operations() -> None:
        assert len(operations.ListOperations(operations_pb2.ListOperationsRequest(page_size=1000)).operations) > 50

    def change() -> None:
        named: dict[str, Any] = {"name": f"adapters/{created[0]}"}
        record = adapters.GetAdapter(adapters_pb2.GetAdapterRequest(**named)).adapter
        assert adapters.ListAdapterVersions(adapters_pb2.ListAdapterVersionsRequest(**named)).versions
        changed: dict[str, Any] = {"adapter": {**named, "labels": labels}, "update_mask": {"paths": ["labels"]}}
        adapters.UpdateAdapter(adapters_pb2.UpdateAdapterRequest(**changed))
        active = {**named, "digest": record.active_version.digest}
        adapters.ActivateAdapterVersion(adapters_pb2.ActivateAdapterVersionRequest(**active))

    def pin() -> None:
        for name in created[:20]:
            adapters.PinAdapter(adapters_pb2.PinAdapterRequest(name=f"adapters/{name}"))
            adapters.UnpinAdapter(adapters_pb2.UnpinAdapterRequest(name=f"adapters/{name}"))

    def get_status() -> None:
        for _ in range(300):  # each is a tenant of its own
            generate(channel, tenant=f"tenant-{next(numbers)}", adapter=GOOD_ADAPTER)
        assert len(status.GetStatus(status_pb2.GetStatusRequest()).tenants) == 256

    def check_health() -> None:
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING

    def delete() -> None:
        for _ in range(NUM_ADAPTERS // NUM_REPEATS):
            ended(adapters.DeleteAdapter(adapters_pb2.DeleteAdapterRequest(name=f"adapters/{created.pop()}")))

    check(target.system, "CreateAdapter, WaitOperation", create)
    check(target.system, "UploadAdapter", upload)
    check(target.system, "ListAdapters", list_adapters)
    check(target.system, "ListOperations", list_operations)
    check(target.system, "GetAdapter, ListAdapterVersions, UpdateAdapter, ActivateAdapterVersion", change)
    check(target.system, "PinAdapter, UnpinAdapter", pin)
    check(target.system, "GetStatus", get_status)
    check(target.system, "health", check_health)
    check(target.system, "DeleteAdapter", delete)
    while created:
        delete()


@pytest.fixture(scope="module")
def large_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A hash worker with a long context, so that what is large is computed and not refused."""
    directory = tmp_path_factory.mktemp("large")
    model = make_tokenizer(make_checkpoint(directory / "model", arch="llama", max_position_embeddings=CONTEXT))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["x" * 64])  # without a long token, a long text is refused by its length alone
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags, watched = ["--trust-tenant-names"], command(directory / "report")
    with System(model, directory, control_flags=flags, control_command=watched) as system:
        system.start_hash_worker("w0", ["--num-blocks", "20000", "--token-budget", "8192"])
        yield system


WORDS = "hello world the quick brown fox " * 34_000
PROMPT = [5 + number % 200 for number in range(CONTEXT)]
NEARLY_STOPS = [*("a" * 124 + chr(ord("b") + number) + "a" * 125 for number in range(15)), "a" * 249 + "z"]
LARGE: dict[str, dict[str, Any]] = {
    "a text of 1 MB": {"text": WORDS[:1_000_000]},
    "a text of 1 MB without spaces": {"text": (WORDS * 2).replace(" ", "")[:1_000_000]},
    "a conversation of 1 MB": {"chat": {"messages": [{"role": "user", "content": WORDS[:1_000_000]}]}},
    "a text as long as the context": {"text": WORDS[: CONTEXT - 2]},
    "as many token ids as the context takes": {"token_ids": {"ids": PROMPT[:-2]}},
    "log-probabilities of a prompt": {"token_ids": {"ids": PROMPT[:12_400]}, "sampling": {"prompt_logprobs": 20}},
    "ranked samples with log-probabilities": {
        "decoding": {"n": 16, "best_of": 17},
        "sampling": {"logprobs": 20, "temperature": 1},
        "stopping": {"max_tokens": 200, "ignore_eos": True},
    },
    "a beam search": {
        "decoding": {"n": 8, "beam_search": {"width": 8}},
        "stopping": {"max_tokens": 600, "ignore_eos": True},
    },
    "a long stream that goes on": {
        "resume_from": {"ids": [97] * 100_000},
        "stopping": {"max_tokens": 100_003, "ignore_eos": True, "stop": NEARLY_STOPS},
    },
}


@pytest.mark.parametrize("what", LARGE)
def test_no_large_request_holds_up_the_loop(large_system: System, what: str) -> None:
    with grpc.insecure_channel(large_system.address) as channel:

        def call() -> None:
            code = generate(channel, **LARGE[what])
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)

        check(large_system, what, call)


def test_texts_of_many_tenants_at_once_hold_up_the_loop_no_longer_than_one(large_system: System) -> None:
    with grpc.insecure_channel(large_system.address) as channel, ThreadPoolExecutor(8) as pool:

        def call() -> None:
            calls = [pool.submit(generate, channel, tenant=f"t{number}", text=WORDS[:1_000_000]) for number in range(8)]
            assert {call.result() for call in calls} == {grpc.StatusCode.INVALID_ARGUMENT}

        check(large_system, "eight texts of 1 MB", call)


def test_unknown_adapters_hold_up_the_loop_for_moments_only(large_system: System) -> None:
    numbers = itertools.count()  # a name that was not known once is not searched for again
    with grpc.insecure_channel(large_system.address) as channel:

        def call() -> None:
            codes = {generate(channel, adapter=f"nobody-{next(numbers)}") for _ in range(300)}
            assert codes == {grpc.StatusCode.NOT_FOUND}

        check(large_system, "unknown adapters", call)


def generate(channel: grpc.Channel, *, tenant: str = "default", **fields: Any) -> grpc.StatusCode:
    """How one request ends."""
    if not {"text", "chat", "token_ids"} & fields.keys():
        fields["token_ids"] = {"ids": [9, 10, 11]}
    fields.setdefault("stopping", {"max_tokens": 1})
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.GenerateRequest(**fields)
    call = stub.Generate(request, timeout=TIMEOUT_S, metadata=[("motet-tenant", tenant)])
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK
