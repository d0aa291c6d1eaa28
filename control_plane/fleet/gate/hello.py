"""Whether a worker may attach: its Hello against the base model and the protocol."""

from __future__ import annotations

from typing import Protocol

from contract import OLDEST_PROTOCOL, PROTOCOL, common_protocol
from contract.fingerprint import NOT_QUANTIZED
from contract.hello_bounds import (
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_HIDDEN_WIDTH,
    MAX_HOST_BLOCKS,
    MAX_ROWS,
    MAX_SLOTS,
    MAX_STEP_TOKENS,
)
from contract.ids import WORKER_ID_FORM, is_worker_id
from contract.v1 import plan_pb2
from control_plane.errors import BaseModelMismatch, FieldViolation, InvalidRequest
from control_plane.fleet.workers.reports import check_targets

_INT32_MAX = 2**31 - 1
# Bounds a little above what machines have: 2^24 blocks of 16 tokens are 268 million tokens. Within them, a plan that
# moves every host block and names every row is no larger than a message may be.
MAX_DEVICE_CHARS = 128
MAX_BYTES = 1 << 50
# Field -> lowest and highest value. Ids travel as int32.
BOUNDS = {
    "num_blocks": (1, MAX_BLOCKS),
    "block_size": (1, MAX_BLOCK_SIZE),
    "max_rows": (1, MAX_ROWS),
    "max_step_tokens": (1, MAX_STEP_TOKENS),
    "arena_bytes": (0, MAX_BYTES),
    "num_slots": (1, MAX_SLOTS),
    "max_model_len": (2, _INT32_MAX),
    "max_adapter_model_len": (0, _INT32_MAX),
    "vocab_size": (1, _INT32_MAX),
    "num_host_blocks": (0, MAX_HOST_BLOCKS),
    "hidden_width": (0, MAX_HIDDEN_WIDTH),
}


class BaseModelLike(Protocol):
    """What the fleet needs to know of the base model."""

    @property
    def fingerprint(self) -> str:
        """Names the checkpoint, 64 lower-case hexadecimal digits."""

    @property
    def dtype(self) -> str:
        """Serving dtype: "float32", "bfloat16" or "float16"."""

    @property
    def quantization(self) -> str:
        """How workers hold its linears, of contract.fingerprint."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""


def check_hello(hello: plan_pb2.Hello, base_model: BaseModelLike) -> None:
    """Raise InvalidRequest or BaseModelMismatch, with every value that is wrong, if the worker may not attach."""
    violations = []
    if common_protocol(hello.protocol_min, hello.protocol_max) is None:
        raise BaseModelMismatch(
            f"the worker speaks protocol {hello.protocol_min} to {hello.protocol_max}, the control plane "
            f"{OLDEST_PROTOCOL} to {PROTOCOL}; run both from the same version, or from neighbouring releases"
        )
    if not is_worker_id(hello.worker_id):
        violations.append(
            FieldViolation("hello.worker_id", f"{hello.worker_id[:80]!r} is not a valid worker id: {WORKER_ID_FORM}")
        )
    if len(hello.device) > MAX_DEVICE_CHARS:
        violations.append(FieldViolation("hello.device", f"{len(hello.device)} characters; at most {MAX_DEVICE_CHARS}"))
    elif not hello.device.isprintable():  # `motet status` shows it on a terminal
        violations.append(FieldViolation("hello.device", "has characters that do not print; use printable text"))
    for name, (lowest, highest) in BOUNDS.items():
        value = getattr(hello, name)
        if not lowest <= value <= highest:
            violations.append(FieldViolation(f"hello.{name}", f"{value} is not in {lowest}..{highest}"))
    for field in hello.memory.DESCRIPTOR.fields:
        if (num_bytes := getattr(hello.memory, field.name)) > MAX_BYTES:
            violations.append(FieldViolation(f"hello.memory.{field.name}", f"{num_bytes} is not in 0..{MAX_BYTES}"))
    violations += check_targets(hello)
    if violations:
        raise InvalidRequest(*violations)
    if hello.model_fingerprint != base_model.fingerprint:
        raise BaseModelMismatch(
            f"worker {hello.worker_id} holds checkpoint {hello.model_fingerprint[:12]!r}, this control plane serves "
            f"{base_model.fingerprint[:12]!r}; start both with the same checkpoint"
        )
    if hello.dtype != base_model.dtype:
        raise BaseModelMismatch(
            f"worker {hello.worker_id} computes in {hello.dtype[:20]!r}, this control plane serves "
            f"{base_model.dtype!r}; start both with the same --dtype"
        )
    quantization = hello.quantization or NOT_QUANTIZED
    if quantization != base_model.quantization:
        raise BaseModelMismatch(
            f"worker {hello.worker_id} holds its weights with quantization {quantization[:20]!r}, this control plane "
            f"serves {base_model.quantization!r}; start both with the same --quantization"
        )
    if hello.vocab_size != base_model.vocab_size:
        raise BaseModelMismatch(
            f"worker {hello.worker_id} has {hello.vocab_size} logits, the base model {base_model.vocab_size}"
        )
