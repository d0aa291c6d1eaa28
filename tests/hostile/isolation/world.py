"""A server with authentication, two tenants that have the same kinds of things, and what a caller gets to see."""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.longrunning import operations_pb2
from google.protobuf.message import Message
from motet.v1 import adapters_pb2

from tests.e2e.harness import System
from tests.hostile.isolation import matrix
from tests.hostile.isolation.things import WORD, Things, nowhere
from tests.makers import make_adapter, make_checkpoint, make_tokenizer

TIMEOUT_S = 60.0
ADAPTERS = "/motet.v1.AdapterService/"
OPERATIONS = "/google.longrunning.Operations/"
GENERATE = "/motet.v1.GenerationService/Generate"
TENANT_ROLES = ["infer", "adapters.write"]
# Fields of responses that differ from call to call, or follow from the text of a prompt. What the prefix cache reports
# depends on what the caller itself sent before; it has a test of its own.
VOLATILE = {"uid", "etag", "create_time", "update_time", "queue_time", "timings", "render_time", "resume_token"}
VOLATILE |= {"token_ids", "text", "prompt_sha256", "cached_tokens", "values", "logits", "probabilities"}


@dataclass(frozen=True)
class Seen:
    """All that comes back from one call."""

    code: grpc.StatusCode
    message: str = ""
    details: bytes = b""  # google.rpc.Status
    metadata: tuple[tuple[str, str | bytes], ...] = ()  # initial and trailing, the details left out
    responses: tuple[bytes, ...] = ()

    def raw(self) -> bytes:
        """Everything in one piece, to look for texts in it."""
        metadata = [part.encode() if isinstance(part, str) else part for pair in self.metadata for part in pair]
        return b"\n".join([self.message.encode(), self.details, *metadata, *self.responses])


@dataclass(frozen=True)
class Key:
    """A credential."""

    id: str
    token: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)


def new_key(key_id: str) -> Key:
    """A key with this id."""
    return Key(key_id, f"motet_{key_id}_{secrets.token_hex(32)[:43]}")


class World:
    """Use as a context manager."""

    def __init__(self, work_dir: Path) -> None:
        self._stack = ExitStack()
        self.model_dir = make_tokenizer(make_checkpoint(work_dir / "model", arch="llama"))
        self.keys = {name: new_key(f"{name}key1") for name in ("acme", WORD, "admin")}
        tenants = {"acme": "acme", WORD: f"{WORD}-corp", "admin": "operators"}
        entries = [
            {
                "id": key.id,
                "sha256": hashlib.sha256(key.token.encode()).hexdigest(),
                "tenants": [tenants[name]],
                "roles": ["admin"] if name == "admin" else TENANT_ROLES,
            }
            for name, key in self.keys.items()
        ]
        (work_dir / "keys.json").write_text(json.dumps({"keys": entries}), "utf-8")
        prefixes = {f"{WORD}-corp": {"name_prefixes": [f"{WORD}.", "yebra."]}}
        (work_dir / "tenants.json").write_text(json.dumps(prefixes), "utf-8")
        self.work_dir = work_dir
        self.system = System(
            self.model_dir,
            work_dir / "system",
            control_flags=[
                *("--host-cache", "memory", "--api-keys", str(work_dir / "keys.json")),
                *("--tenants", str(work_dir / "tenants.json"), "--max-streams-per-connection", "1000"),
            ],
        )
        self.mine: Things
        self.other: Things
        self.nobodys: Things

    def __enter__(self) -> Self:
        self._stack.enter_context(self.system)
        self.system.start_hash_worker("w0", ["--num-blocks", "256", "--block-size", "4"])
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = self._stack.enter_context(grpc.insecure_channel(self.system.address, options=options))
        self.files = self.adapter_files(seed=99)
        self.mine = self._things_of("acme", "acme", "acme", first_seed=1)
        self.other = self._things_of(WORD, WORD, f"{WORD}-corp", first_seed=11)
        self.nobodys = nowhere(self.other)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, traceback)

    def call(
        self,
        key: str,
        method: str,
        messages: Iterable[Message | bytes],
        metadata: Sequence[tuple[str, str]] = (),
        *,
        num_responses: int | None = None,
    ) -> Seen:
        """Make a call as one of the keys. `num_responses`: how many are read before the call is given up."""
        raw: Any = self._channel  # the stubs demand serializers; these messages are bytes
        encoded = [one if isinstance(one, bytes) else one.SerializeToString() for one in messages]
        sent = [*self.keys[key].metadata, *metadata]
        call = raw.stream_stream(method)(iter(encoded), timeout=TIMEOUT_S, metadata=sent)
        responses: list[bytes] = []
        try:
            for response in call:
                responses.append(response)
                if len(responses) == num_responses:
                    call.cancel()
                    return Seen(grpc.StatusCode.OK, responses=tuple(responses))
        except grpc.RpcError:
            pass
        got = [*(call.initial_metadata() or ()), *(call.trailing_metadata() or ())]
        details = next((value for name, value in got if name == "grpc-status-details-bin"), b"")
        others = tuple((name, value) for name, value in got if name != "grpc-status-details-bin")
        return Seen(call.code(), call.details() or "", details, others, tuple(responses))

    def taken(self, key: str, method: str, *messages: Message) -> Any:
        """The response to a call that must succeed."""
        seen = self.call(key, method, messages)
        assert seen.code is grpc.StatusCode.OK, f"{method}: {seen.code} {seen.message}"
        return matrix.response_type(method).FromString(seen.responses[0])

    def hold_generation(self, key: str, message: Message) -> None:
        """Start a generation that goes on until the end of the world, once its first message came."""
        raw: Any = self._channel
        encoded = iter([message.SerializeToString()])
        call = raw.stream_stream(GENERATE)(encoded, timeout=600, metadata=self.keys[key].metadata)
        next(call)
        self._stack.callback(call.cancel)

    def adapter_files(self, seed: int) -> dict[str, bytes]:
        directory = self.work_dir / f"adapter-{seed}"
        make_adapter(directory, self.model_dir, rank=2, alpha=4, targets=["q_proj"], seed=seed)
        names = ("adapter_config.json", "adapter_model.safetensors")
        return {name: (directory / name).read_bytes() for name in names}

    def _things_of(self, key: str, word: str, tenant: str, *, first_seed: int) -> Things:
        """Register, change, pin, delete and generate as one tenant."""

        def register(adapter_id: str, seed: int, **header: Any) -> adapters_pb2.Adapter:
            stream = matrix.upload(self.adapter_files(first_seed + seed), adapter_id, **header)
            adapter: adapters_pb2.Adapter = self.taken(key, f"{ADAPTERS}UploadAdapter", *stream).adapter
            return adapter

        adapter_id, about = (
            f"{word}-one",
            {"display_name": f"{word} display", "labels": {f"{word}-key": f"{word}-value"}},
        )
        removed = register(adapter_id, 0, **about)
        former = register(adapter_id, 1)
        upload_request_id = f"{word}-upload-1"
        register(adapter_id, 2, request_id=upload_request_id)
        upload_id = f"{word}-upload-2"
        broken = matrix.upload(self.adapter_files(first_seed + 2), adapter_id, upload_id=upload_id)[:-1]
        assert self.call(key, f"{ADAPTERS}UploadAdapter", broken).code is grpc.StatusCode.INVALID_ARGUMENT
        shared = register(f"{word}-shared", 3, visibility="ADAPTER_VISIBILITY_SHARED", shared_with=[f"{word}-friend"])
        reserved = register(f"{word}.reserved", 4)
        version = adapters_pb2.DeleteAdapterVersionRequest(
            name=f"adapters/{adapter_id}", digest=removed.active_version.digest
        )
        operation = self.taken(key, f"{ADAPTERS}DeleteAdapterVersion", version)
        self.taken(key, f"{OPERATIONS}WaitOperation", operations_pb2.WaitOperationRequest(name=operation.name))
        self.taken(key, f"{ADAPTERS}PinAdapter", adapters_pb2.PinAdapterRequest(name=f"adapters/{adapter_id}"))
        adapter = self.taken(
            key, f"{ADAPTERS}GetAdapter", adapters_pb2.GetAdapterRequest(name=f"adapters/{adapter_id}")
        ).adapter
        running, salt, text = f"{word}-running", f"{word}-salt", f"{word} writes"
        endless = {"max_tokens": 400, "ignore_eos": True}
        self.hold_generation(key, matrix.generate(request_id=running, adapter=adapter_id, stopping=endless))
        prompt = [len(word), *matrix.PROMPT]
        for cache_salt in (salt, ""):
            request = matrix.generate(cache_salt=cache_salt, token_ids={"ids": prompt})
            assert self.call(key, GENERATE, [request]).code is grpc.StatusCode.OK
        return Things(
            tenant=tenant,
            key_id=self.keys[key].id,
            adapter_id=adapter_id,
            digest=adapter.active_version.digest,
            former_digest=former.active_version.digest,
            uid=adapter.uid,
            etag=adapter.etag,
            operation_id=operation.name.removeprefix("operations/"),
            running_request_id=running,
            upload_request_id=upload_request_id,
            upload_id=upload_id,
            display_name=f"{word} display",
            label_key=f"{word}-key",
            label_value=f"{word}-value",
            cache_salt=salt,
            prompt_sha256=hashlib.sha256(struct.pack(f"<{len(prompt)}I", *prompt)).hexdigest(),
            shared_id=shared.name.removeprefix("adapters/"),
            reserved_id=reserved.name.removeprefix("adapters/"),
            prefix=f"{word}.",
            friend=f"{word}-friend",
            text=text,
        )


def comparable(seen: Seen, method: str) -> tuple[Any, ...]:
    """What came back without what differs every time."""
    kind = matrix.response_type(method)
    responses = []
    for raw in seen.responses:
        message = kind.FromString(raw)
        clear_volatile(message)
        responses.append(message.SerializeToString(deterministic=True))
    return (seen.code, seen.message.encode(), seen.details, repr(seen.metadata).encode(), *responses)


def clear_volatile(message: Any) -> None:
    """Remove VOLATILE fields, and the request ids that the server makes."""
    for field, value in message.ListFields():
        if field.name in VOLATILE or (field.name == "request_id" and value.startswith("req-")):
            message.ClearField(field.name)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else [value]:
                clear_volatile(inner)


def with_nobodys(parts: tuple[Any, ...], other: Things, nobodys: Things) -> tuple[Any, ...]:
    """The same with each value of `other` replaced by the one of `nobodys`: both are of one length."""

    def replaced(part: Any) -> Any:
        if isinstance(part, bytes):
            for text, control in zip(other.secrets, _in_order(other, nobodys), strict=True):
                part = part.replace(text.encode(), control.encode())
        return part

    return tuple(map(replaced, parts))


def _in_order(other: Things, nobodys: Things) -> list[str]:
    by_text = dict(zip(other.values().values(), nobodys.values().values(), strict=True))
    by_text |= {text[:12]: control[:12] for text, control in by_text.items()}
    return [by_text[text] for text in other.secrets]


def secrets_in(seen: Seen, other: Things, sent: bytes) -> list[str]:
    """Values of `other` that came back, of those that were not sent. Of a resource name its id may have been sent."""
    raw = seen.raw()
    found = [text for text in other.secrets if text.encode() in raw]
    return [text for text in found if text.rpartition("/")[2].encode() not in sent]
