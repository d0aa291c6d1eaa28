"""Whatever a client or a worker sends gets the status and the field that the corpus says, and the server goes on."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from motet.v1 import (
    adapters_pb2,
    fleet_pb2,
    generation_pb2,
    model_pb2,
    pooling_pb2,
    residency_pb2,
    status_pb2 as status_service_pb2,
)

from contract.v1 import plan_pb2
from tests.hostile.bad_inputs import generation, uploads, worker_port
from tests.hostile.bad_inputs.case import OK, Case, Outcome, send
from tests.hostile.bad_inputs.corpus import CLIENT_TABLES, Target
from tests.hostile.bad_inputs.facts import CONFIG_FILE, WEIGHTS_FILE, Facts
from tests.makers import make_adapter, make_checkpoint

LEAST_CASES = 1800
# Fields of requests that take every value, those within them included, and fields that only responses set: no case can
# be refused in their name.
FREE = {
    "motet.v1.StoppingParams.ignore_eos",
    "motet.v1.OutputParams.include_stop",
    "motet.v1.OutputParams.skip_special_tokens",
    "motet.v1.BeamSearchParams.early_stopping",
    "motet.v1.SamplingParams.seed",
    "motet.v1.EmbedRequest.normalize",
    "motet.v1.ChatMessage.content",  # any text; its length is refused in the name of the prompt
    "motet.v1.ChatMessage.reasoning",  # likewise
    "motet.v1.ContentPart.text",
    "motet.v1.TokenizeRequest.add_special_tokens",
    "motet.v1.TokenizeRequest.return_tokens",
    "motet.v1.DetokenizeRequest.skip_special_tokens",
    "motet.v1.UploadHeader.validate_only",
    "motet.v1.CreateAdapterRequest.validate_only",
    *(
        f"motet.v1.Adapter.{name}"
        for name in (
            *("uid", "state", "state_reason", "active_version", "pinned", "placements", "create_time", "update_time"),
            *("registration", "previous_digests"),
        )
    ),
    "motet.v1.VersionRollout.keep_active",
    "motet.v1.WatchAdaptersRequest.with_residency",
    "motet.v1.DrainWorkerRequest.force",
    "motet.worker.v1.Hello.parallel",
    "motet.worker.v1.TargetModules.is_interleaved",
    "motet.worker.v1.PooledRow.row",  # of a row that requested none; the case has row 0
    "motet.worker.v1.StepResult.step_time_us",
    "motet.worker.v1.StepResult.num_moved_blocks",
    "motet.worker.v1.StepResult.move_time_us",
    "motet.worker.v1.SlotState.digest",
    "motet.worker.v1.SlotState.retryable",
    "motet.worker.v1.SlotState.mismatch",
    "motet.worker.v1.SlotState.arena_used_bytes",
    "motet.worker.v1.SlotState.load_time_us",
    "motet.worker.v1.AttachRequest.heartbeat",
    "motet.worker.v1.AttachRequest.fault",
    "motet.worker.v1.AttachRequest.leave",  # with any reason
    "motet.worker.v1.FetchAdapterRequest.reads_files",  # any value is right
    "motet.worker.v1.FetchAdapterRequest.worker_id",  # for the log
}
SERVICES = [
    service
    for file in (
        *(generation_pb2, model_pb2, pooling_pb2, adapters_pb2, residency_pb2, fleet_pb2),
        *(status_service_pb2, plan_pb2),
    )
    for service in file.DESCRIPTOR.services_by_name.values()
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("target")) as target:
        yield target
        found = target.rest_problems()
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def facts(target: Target) -> Facts:
    return target.facts


@pytest.mark.parametrize("table", CLIENT_TABLES)
def test_every_call_of_a_client_ends_as_its_table_says(target: Target, table: str) -> None:
    check(target.client_cases(table))


def test_every_call_to_the_worker_port_ends_as_its_table_says(target: Target) -> None:
    check(target.worker_cases())


def test_every_plan_stream_ends_as_its_table_says(target: Target) -> None:
    check(target.conversations())


def test_mutated_messages_are_answered_with_a_defined_status(target: Target) -> None:
    check(target.mutated(seed=0, count=300))


def test_an_adapter_of_another_base_model_is_refused_with_expected_and_got(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("stranger")
    other = make_checkpoint(directory / "other", arch="llama", hidden_size=96)
    adapter = make_adapter(directory / "adapter", other, rank=4, alpha=8, targets=["q_proj"], seed=1)
    files = {name: (adapter / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    outcome = send(target.client_channel, uploads.case("of another base model", uploads.upload(files, "stranger")))
    assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
    assert all(word in outcome.message for word in ("q_proj", "96", "64"))


def test_a_tenant_over_its_quota_learns_which_and_when_to_come_back(target: Target) -> None:
    def sent(fields: dict[str, object]) -> Outcome:
        return send(target.client_channel, generation.taken(fields, "of a metered tenant", tenant="metered"))

    assert sent({"stopping.max_tokens": 40}).code is OK
    refused = sent({"stopping.max_tokens": 40})
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    info = refused.detail(error_details_pb2.ErrorInfo())
    assert (info.metadata["tenant"], info.metadata["limit"]) == ("metered", "60")
    assert info.metadata["quota"] == "tokens_per_minute"
    assert refused.detail(error_details_pb2.QuotaFailure()).violations[0].subject == "tenants/metered"
    delay = refused.detail(error_details_pb2.RetryInfo()).retry_delay
    assert 0 < delay.ToMilliseconds() <= 26_000  # 43 of 60 were taken, 43 are requested
    alone = sent({"stopping.max_tokens": 58})
    assert (alone.reason, alone.fields) == ("QUOTA_TOO_SMALL", ("stopping.max_tokens",))
    long = sent({"token_ids.ids": [9] * 41, "stopping.max_tokens": 1})
    assert (long.reason, long.fields) == ("QUOTA_TOO_SMALL", ("input",))
    assert target.known_problem() == ""  # the others are not held up
    tenants = {tenant.tenant: tenant for tenant in target.client.status().tenants}
    metered = tenants["metered"]
    assert (metered.weight, metered.num_accepted, metered.num_rejected, metered.num_requests) == (2.0, 1, 1, 0)
    assert (metered.num_input_tokens, metered.num_generated_tokens, metered.max_queued_tokens) == (3, 40, 40)
    assert tenants["default"].num_accepted > 0 and tenants["default"].tokens_per_minute is None


def test_the_corpus_is_large_and_no_two_of_its_cases_have_one_name(facts: Facts) -> None:
    cases = [case.name for case in all_cases(facts)] + [one.name for one in worker_port.conversations(facts)]
    assert len(cases) >= LEAST_CASES
    assert len(cases) - len(set(cases)) < 20, "names that are cut off may be alike"


def test_every_field_of_every_request_is_set_in_a_case_that_is_refused(facts: Facts) -> None:
    methods = [method for service in SERVICES for method in service.methods]
    types = {f"/{method.containing_service.full_name}/{method.name}": method.input_type for method in methods}
    sent: set[str] = set()
    for case in all_cases(facts):
        if case.code is not OK and case.method in types:
            for data in case.messages:
                sent |= fields_in(data, types[case.method])
    for conversation in worker_port.conversations(facts):
        if conversation.code is not OK:
            sent |= set_fields(conversation.hello)
            if conversation.build is not None:
                for message in conversation.build(1, plan_pb2.StepPlan(step_id=1)):
                    sent |= set_fields(message) if isinstance(message, Message) else set()
    fields = every_field(list(types.values()))
    missing = sorted(fields - sent - FREE)
    assert not missing, f"add cases to a table of tests/hostile/bad_inputs, or to FREE with the reason: {missing}"
    assert sorted(FREE - fields) == [], "there are no such fields"


def check(checked: Iterator[list[str]]) -> None:
    found = [problem for one in checked for problem in one]
    assert not found, "\n".join(found)


def all_cases(facts: Facts) -> Iterator[Case]:
    for table in CLIENT_TABLES.values():
        yield from table(facts)
    yield from worker_port.cases(facts)


def fields_in(data: bytes, descriptor: Descriptor) -> set[str]:
    """Full names of the fields that the bytes set; none if they are not a message."""
    try:
        return set_fields(GetMessageClass(descriptor).FromString(data))
    except DecodeError:
        return set()


def set_fields(message: Message) -> set[str]:
    found = set()
    for field, value in message.ListFields():
        found.add(field.full_name)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else [value]:
                found |= set_fields(inner)
    return found


def every_field(descriptors: list[Descriptor]) -> set[str]:
    """Full names of the fields of these messages and of those within them; free fields are not looked into."""
    found: set[str] = set()
    while descriptors:
        for field in descriptors.pop().fields:
            if field.full_name in found or not field.full_name.startswith("motet."):
                continue
            found.add(field.full_name)
            message = field.message_type
            if message is not None and not message.GetOptions().map_entry and field.full_name not in FREE:
                descriptors.append(message)
    return found
