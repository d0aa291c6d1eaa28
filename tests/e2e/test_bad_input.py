"""Bad input gets the right status with the field named, no inner detail leaks, and the next request works.

Talks to the server with bare stubs: the SDK would refuse some of this before it is sent.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from motet.v1 import adapters_pb2, adapters_pb2_grpc, generation_pb2, generation_pb2_grpc, types_pb2
from motet.v1 import status_pb2 as status_service_pb2
from motet.v1 import status_pb2_grpc as status_service_pb2_grpc

from tests.e2e.harness import System
from tests.makers import make_adapter, make_checkpoint

INVALID = grpc.StatusCode.INVALID_ARGUMENT
# What no client may ever read: paths, stack traces, classes of ours, Redis keys.
LEAKS = re.compile(r"/tmp/|/root|/home|Traceback|\.py\b|line \d+|motet:a:|<class|redis", re.IGNORECASE)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("system")
    model_dir = make_checkpoint(directory / "model", arch="llama")
    tenants = directory / "tenants.json"
    tenants.write_text('{"metered": {"weight": 2, "tokens_per_minute": 60, "max_queued_tokens": 40}}')
    control_flags = ["--max-adapter-bytes", "4MiB", "--tenants", str(tenants)]
    with System(model_dir, directory, control_flags=control_flags) as system:
        worker_flags = ["--num-blocks", "64", "--block-size", "4", "--max-model-len", "4096", "--max-rows", "12"]
        system.start_hash_worker("w0", worker_flags)
        yield system


@pytest.fixture(scope="module")
def channel(system: System) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(system.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def adapter_files(system: System, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = make_adapter(
        tmp_path_factory.mktemp("good") / "adapter", system.model_dir, rank=4, alpha=8, targets=["q_proj"], seed=1
    )
    return {name: (directory / name).read_bytes() for name in ["adapter_config.json", "adapter_model.safetensors"]}


def generate(channel: grpc.Channel, request: generation_pb2.GenerateRequest | bytes, **metadata: str) -> list[int]:
    """Token ids of one request; raw bytes are sent as they are. `metadata` has _ for -."""
    call = channel.unary_stream(
        "/motet.v1.GenerationService/Generate",
        request_serializer=lambda data: data if isinstance(data, bytes) else data.SerializeToString(),
        response_deserializer=generation_pb2.GenerateResponse.FromString,
    )
    sent = [(key.replace("_", "-"), value) for key, value in metadata.items()]
    return [token for response in call(request, timeout=30, metadata=sent) for token in response.delta.token_ids]


def upload(channel: grpc.Channel, adapter_id: str, files: dict[str, bytes], **header: object) -> str:
    """Register; the digest."""
    response = adapters_pb2_grpc.AdapterServiceStub(channel).UploadAdapter(
        upload_messages(adapter_id, files, **header), timeout=30
    )
    return str(response.adapter.active_version.digest)


def upload_messages(
    adapter_id: str, files: dict[str, bytes], **header: object
) -> Iterator[adapters_pb2.UploadAdapterRequest]:
    listed = [
        adapters_pb2.UploadFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    ]
    yield adapters_pb2.UploadAdapterRequest(
        header=adapters_pb2.UploadHeader(adapter_id=adapter_id, files=listed, **header)  # type: ignore[arg-type]
    )
    for index, data in enumerate(files.values()):
        for offset in range(0, len(data), 65536):
            yield adapters_pb2.UploadAdapterRequest(
                chunk=adapters_pb2.UploadChunk(file_index=index, offset=offset, data=data[offset : offset + 65536])
            )


def details(error: grpc.RpcError) -> tuple[str, list[str]]:
    """ErrorInfo reason and the fields that the BadRequest detail names."""
    metadata = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    reason, fields = "", []
    for packed in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if packed.Unpack(info):
            reason = info.reason
            assert info.domain == "motet"
        elif packed.Unpack(bad):
            fields = [violation.field for violation in bad.field_violations]
    return reason, fields


def request(**fields: object) -> generation_pb2.GenerateRequest:
    """A good request with some fields replaced."""
    base: dict[str, object] = {"token_ids": types_pb2.TokenIds(ids=[9, 10, 11])}
    if "text" in fields or "chat" in fields:
        base = {}
    return generation_pb2.GenerateRequest(**{**base, **fields})  # type: ignore[arg-type]


def sampling(**fields: object) -> generation_pb2.GenerateRequest:
    return request(sampling=types_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


def stopping(**fields: object) -> generation_pb2.GenerateRequest:
    return request(stopping=types_pb2.StoppingParams(**fields))  # type: ignore[arg-type]


def decoding(**fields: object) -> generation_pb2.GenerateRequest:
    return request(decoding=types_pb2.DecodingParams(**fields))  # type: ignore[arg-type]


def beams(width: int, **fields: object) -> generation_pb2.GenerateRequest:
    search = types_pb2.DecodingParams(beam_search=types_pb2.BeamSearchParams(width=width))
    return request(decoding=search, **fields)


BAD_REQUESTS: dict[str, tuple[generation_pb2.GenerateRequest | bytes, grpc.StatusCode, str]] = {
    "malformed protobuf": (b"\x0a\xff\xff\xff\xff\x0f", INVALID, ""),
    "invalid utf-8": (b"\x12\x02\xff\xfe", INVALID, ""),
    "no input": (generation_pb2.GenerateRequest(), INVALID, "input"),
    "empty text": (request(text=""), INVALID, "text"),
    "empty token ids": (request(token_ids=types_pb2.TokenIds()), INVALID, "token_ids"),
    "empty chat": (request(chat=types_pb2.ChatMessages()), INVALID, "chat"),
    "token id out of range": (request(token_ids=types_pb2.TokenIds(ids=[1, 256])), INVALID, "token_ids"),
    "token id 2^32-1": (request(token_ids=types_pb2.TokenIds(ids=[2**32 - 1])), INVALID, "token_ids"),
    "prompt too long": (request(token_ids=types_pb2.TokenIds(ids=[9] * 5000)), INVALID, "token_ids"),
    "more than the KV cache": (request(token_ids=types_pb2.TokenIds(ids=[9] * 250)), INVALID, ""),
    "NaN temperature": (sampling(temperature=float("nan")), INVALID, "sampling.temperature"),
    "negative temperature": (sampling(temperature=-1.0), INVALID, "sampling.temperature"),
    "infinite temperature": (sampling(temperature=float("inf")), INVALID, "sampling.temperature"),
    "top_k 0": (sampling(top_k=0), INVALID, "sampling.top_k"),
    "top_p 0": (sampling(top_p=0.0), INVALID, "sampling.top_p"),
    "top_p above 1": (sampling(top_p=1.5), INVALID, "sampling.top_p"),
    "min_p above 1": (sampling(min_p=1.5), INVALID, "sampling.min_p"),
    "NaN repetition_penalty": (sampling(repetition_penalty=float("nan")), INVALID, "sampling.repetition_penalty"),
    "repetition_penalty 0": (sampling(repetition_penalty=0.0), INVALID, "sampling.repetition_penalty"),
    "presence_penalty": (sampling(presence_penalty=-2.5), INVALID, "sampling.presence_penalty"),
    "frequency_penalty": (sampling(frequency_penalty=float("inf")), INVALID, "sampling.frequency_penalty"),
    "bias of an unknown token": (sampling(logit_bias={256: 1.0}), INVALID, "sampling.logit_bias"),
    "NaN bias": (sampling(logit_bias={2: float("nan")}), INVALID, "sampling.logit_bias"),
    "many biases": (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), INVALID, "sampling.logit_bias"),
    "many logprobs": (sampling(logprobs=21), INVALID, "sampling.logprobs"),
    "many prompt_logprobs": (sampling(prompt_logprobs=21), INVALID, "sampling.prompt_logprobs"),
    "min_tokens above max_tokens": (stopping(max_tokens=2, min_tokens=3), INVALID, "stopping.min_tokens"),
    "n 0": (decoding(n=0), INVALID, "decoding.n"),
    "n 2^32-1": (decoding(n=2**32 - 1), INVALID, "decoding.n"),
    "best_of below n": (decoding(n=3, best_of=2), INVALID, "decoding.best_of"),
    "more answers than rows": (decoding(n=13), INVALID, "decoding.best_of"),
    "more beams than rows": (beams(13), INVALID, "decoding.beam_search.width"),
    "17 beams": (beams(17), INVALID, "decoding.beam_search.width"),
    "beams that sample": (beams(2, sampling={"temperature": 1.0}), INVALID, "sampling.temperature"),
    "beams with a stop string": (beams(2, stopping={"stop": ["x"]}), INVALID, "stopping.stop"),
    "resume of beams": (beams(2, resume_from={"ids": [9]}), INVALID, "resume_from"),
    "resume of two answers": (request(decoding={"n": 2}, resume_from={"ids": [9]}), INVALID, "resume_from"),
    "priority": (request(priority=-101), INVALID, "priority"),
    "max_tokens 0": (stopping(max_tokens=0), INVALID, "stopping.max_tokens"),
    "max_tokens 2^32-1": (stopping(max_tokens=2**32 - 1), INVALID, "stopping.max_tokens"),
    "empty stop string": (stopping(stop=[""]), INVALID, "stopping.stop"),
    "too many stop strings": (stopping(stop=["x"] * 1000), INVALID, "stopping.stop"),
    "stop token out of range": (stopping(stop_token_ids=[70000]), INVALID, "stopping.stop_token_ids"),
    "unknown adapter": (request(adapter="adapters/nobody"), grpc.StatusCode.NOT_FOUND, ""),
    "path-like adapter": (request(adapter="../../etc/passwd"), INVALID, "adapter"),
    "adapter name with NUL": (request(adapter="a\0b"), INVALID, "adapter"),
    "bad digest": (request(adapter="x", adapter_digest="zz"), INVALID, "adapter_digest"),
    "long request id": (request(request_id="r" * 1000), INVALID, "request_id"),
    "long cache salt": (request(cache_salt="s" * 1000), INVALID, "cache_salt"),
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_bad_request_is_refused_and_the_next_one_works(channel: grpc.Channel, what: str) -> None:
    bad, code, field = BAD_REQUESTS[what]
    with pytest.raises(grpc.RpcError) as caught:
        generate(channel, bad)
    assert caught.value.code() == code, caught.value.details()
    assert not LEAKS.search(caught.value.details() or "")
    reason, fields = details(caught.value)
    assert reason
    if field:
        assert any(name == field or name.startswith(f"{field}[") or name.startswith(f"{field}.") for name in fields), (
            fields
        )
    assert len(generate(channel, stopping(max_tokens=3, ignore_eos=True))) == 3


@pytest.mark.parametrize("tenant", ["", "UPPER", "a b", "x" * 64])
def test_bad_tenant_is_refused(channel: grpc.Channel, tenant: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(channel, stopping(max_tokens=2), motet_tenant=tenant)
    assert caught.value.code() == INVALID
    assert details(caught.value) == ("FIELD_INVALID", ["motet-tenant"])


def test_tenant_over_its_quota_is_told_which_and_when_to_come_back(channel: grpc.Channel) -> None:
    assert generate(channel, stopping(max_tokens=40, ignore_eos=True), motet_tenant="metered")
    with pytest.raises(grpc.RpcError) as caught:
        generate(channel, stopping(max_tokens=40), motet_tenant="metered")
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = dict(caught.value.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    info, failure, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.QuotaFailure(),
        error_details_pb2.RetryInfo(),
    )
    assert all(any(packed.Unpack(kind) for packed in status.details) for kind in (info, failure, retry))
    assert (info.reason, dict(info.metadata)["quota"]) == ("QUOTA_EXCEEDED", "tokens_per_minute")
    assert (info.metadata["tenant"], info.metadata["limit"]) == ("metered", "60")
    assert failure.violations[0].subject == "tenants/metered"
    assert 0 < retry.retry_delay.ToMilliseconds() <= 26_000  # 43 of 60 were taken, 43 are asked for
    with pytest.raises(grpc.RpcError) as alone:
        generate(channel, stopping(max_tokens=58), motet_tenant="metered")
    assert (alone.value.code(), details(alone.value)) == (INVALID, ("QUOTA_TOO_SMALL", ["stopping.max_tokens"]))
    with pytest.raises(grpc.RpcError) as long:
        generate(channel, request(token_ids={"ids": [9] * 41}, stopping={"max_tokens": 1}), motet_tenant="metered")
    assert details(long.value) == ("QUOTA_TOO_SMALL", ["input"])
    assert len(generate(channel, stopping(max_tokens=3, ignore_eos=True))) == 3  # the others are not held up
    told = status_service_pb2_grpc.StatusServiceStub(channel).GetStatus(status_service_pb2.GetStatusRequest())
    tenants = {tenant.tenant: tenant for tenant in told.tenants}
    metered = tenants["metered"]
    assert (metered.weight, metered.num_accepted, metered.num_rejected, metered.num_requests) == (2.0, 1, 1, 0)
    assert (metered.num_input_tokens, metered.num_generated_tokens, metered.max_queued_tokens) == (3, 40, 40)
    assert tenants["default"].num_accepted > 0 and not tenants["default"].HasField("tokens_per_minute")


def config_with(files: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    config = {**json.loads(files["adapter_config.json"]), **changes}
    return {**files, "adapter_config.json": json.dumps(config).encode()}


def tensors_with(files: dict[str, bytes], data: bytes) -> dict[str, bytes]:
    return {**files, "adapter_model.safetensors": data}


def header_bomb(files: dict[str, bytes]) -> dict[str, bytes]:
    entries = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(50_000)}
    header = json.dumps(entries).encode()
    return tensors_with(files, len(header).to_bytes(8, "little") + header)


def with_nan(files: dict[str, bytes]) -> dict[str, bytes]:
    data = bytearray(files["adapter_model.safetensors"])
    data[-4:] = b"\x00\x00\xc0\x7f"
    return tensors_with(files, bytes(data))


BAD_ADAPTERS: dict[str, Callable[[dict[str, bytes]], dict[str, bytes]]] = {
    "truncated weights": lambda f: tensors_with(f, f["adapter_model.safetensors"][:-8]),
    "header cut": lambda f: tensors_with(f, f["adapter_model.safetensors"][:40]),
    "empty weights": lambda f: tensors_with(f, b""),
    "pickle": lambda f: tensors_with(f, pickle.dumps({"a": 1}, protocol=2)),
    "zip": lambda f: tensors_with(f, b"PK\x03\x04" + b"\0" * 100),
    "header of 2^60 bytes": lambda f: tensors_with(f, (2**60).to_bytes(8, "little") + b"{}"),
    "header bomb": header_bomb,
    "NaN weight": with_nan,
    "config not JSON": lambda f: {**f, "adapter_config.json": b"not json"},
    "unknown config key": lambda f: config_with(f, surprise=1),
    "rank 0": lambda f: config_with(f, r=0),
    "rank that is not the tensors'": lambda f: config_with(f, r=16),
    "DoRA": lambda f: config_with(f, use_dora=True),
    "another kind": lambda f: config_with(f, peft_type="IA3"),
    "regex targets": lambda f: config_with(f, target_modules="(.*)*X"),
    "modules_to_save": lambda f: config_with(f, modules_to_save=["lm_head"]),
    "only the config": lambda f: {"adapter_config.json": f["adapter_config.json"]},
    "unknown file": lambda f: {**f, "run.py": b"print(1)"},
    "path-like file": lambda f: {**f, "../x": b"1"},
}


@pytest.mark.parametrize("what", BAD_ADAPTERS)
def test_bad_adapter_is_refused_and_nothing_is_registered(
    channel: grpc.Channel, adapter_files: dict[str, bytes], what: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        upload(channel, "bad", BAD_ADAPTERS[what](adapter_files))
    assert caught.value.code() == INVALID, caught.value.details()
    assert not LEAKS.search(caught.value.details() or "")
    assert details(caught.value)[1], "the error names the field, file or tensor"
    stub = adapters_pb2_grpc.AdapterServiceStub(channel)
    listed = stub.ListAdapters(adapters_pb2.ListAdaptersRequest())
    assert "adapters/bad" not in {adapter.name for adapter in listed.adapters}
    assert upload(channel, "good", adapter_files)
    assert len(generate(channel, request(adapter="good", stopping=types_pb2.StoppingParams(max_tokens=2)))) >= 1


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "UPPER", "x" * 64, "a\0b", "a..b", "é"])
def test_bad_adapter_name_is_refused(channel: grpc.Channel, adapter_files: dict[str, bytes], name: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        upload(channel, name, adapter_files)
    assert caught.value.code() == INVALID
    assert details(caught.value)[1] == ["header.adapter_id"]


def test_adapter_of_another_base_model_names_module_expected_and_got(channel: grpc.Channel, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", arch="llama", hidden_size=96)
    directory = make_adapter(tmp_path / "adapter", other, rank=4, alpha=8, targets=["q_proj"], seed=1)
    files = {name: (directory / name).read_bytes() for name in ["adapter_config.json", "adapter_model.safetensors"]}
    with pytest.raises(grpc.RpcError) as caught:
        upload(channel, "stranger", files)
    assert caught.value.code() in (INVALID, grpc.StatusCode.FAILED_PRECONDITION)
    message = caught.value.details() or ""
    assert "q_proj" in message and "96" in message and "64" in message


def test_upload_cut_in_the_middle_registers_nothing(channel: grpc.Channel, adapter_files: dict[str, bytes]) -> None:
    def cut() -> Iterator[adapters_pb2.UploadAdapterRequest]:
        yield from list(upload_messages("cut", adapter_files))[:-1]

    stub = adapters_pb2_grpc.AdapterServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.UploadAdapter(cut(), timeout=30)
    assert caught.value.code() in (INVALID, grpc.StatusCode.DATA_LOSS)
    with pytest.raises(grpc.RpcError) as missing:
        stub.GetAdapter(adapters_pb2.GetAdapterRequest(name="adapters/cut"))
    assert missing.value.code() == grpc.StatusCode.NOT_FOUND


def test_upload_with_a_wrong_hash_is_data_loss(channel: grpc.Channel, adapter_files: dict[str, bytes]) -> None:
    messages = list(upload_messages("flipped", adapter_files))
    data = bytearray(messages[-1].chunk.data)
    data[-1] ^= 1
    messages[-1].chunk.data = bytes(data)
    with pytest.raises(grpc.RpcError) as caught:
        adapters_pb2_grpc.AdapterServiceStub(channel).UploadAdapter(iter(messages), timeout=30)
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS


def test_upload_beyond_the_limit_is_refused_from_its_header(
    channel: grpc.Channel, adapter_files: dict[str, bytes]
) -> None:
    header = next(upload_messages("large", adapter_files))
    header.header.files[1].size_bytes = 5 * 2**20
    with pytest.raises(grpc.RpcError) as caught:
        adapters_pb2_grpc.AdapterServiceStub(channel).UploadAdapter(iter([header]), timeout=30)
    assert caught.value.code() == INVALID
    assert "4194304" in (caught.value.details() or "")


def test_generation_stub_is_the_one_of_the_protobuf_package(channel: grpc.Channel) -> None:
    """The raw call above and the generated stub reach the same method."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    responses = list(stub.Generate(stopping(max_tokens=2, ignore_eos=True), timeout=30))
    assert responses[0].WhichOneof("event") == "started"
    assert responses[-1].finished.usage.completion_tokens == 2
