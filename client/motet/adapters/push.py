"""Turns an adapter in memory into the messages of a push. Knows tensors of numpy and torch by what they look like, so
that neither has to be installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from motet.errors import MotetError, invalid_field
from motet.types import AdapterVisibility, PushedVersion
from motet.v1 import push_pb2
from motet.wire import pushed_from, visibility_message

CHUNK_BYTES = 1024 * 1024
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

# Tensors by the names that adapter_model.safetensors has for them, or the content of that file.
Tensors: TypeAlias = Mapping[str, Any] | bytes


class AdapterPush:
    """One push. Its messages may be made several times."""

    method = "/motet.v1.PushService/PushVersion"
    request_type = push_pb2.PushVersionRequest
    response_type = push_pb2.PushVersionResponse
    failure: MotetError | None = None

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any] | str | bytes,
        tensors: Tensors,
        *,
        visibility: AdapterVisibility | str | None = None,
        shared_with: Sequence[str] = (),
        owner: str = "",
        hold: bool = False,
        validate_only: bool = False,
        signature: bytes = b"",
        files_from: str | int = "",
        without_files: bool = False,
    ) -> None:
        """Raises InvalidArgument for what cannot be an adapter."""
        if signature and (isinstance(config, Mapping) or not isinstance(tensors, bytes)):
            raise invalid_field("signature", "is of bytes; give config and tensors as the bytes that were signed, too")
        self._weights = tensors if isinstance(tensors, bytes) else _safetensors(tensors)
        self._header = push_pb2.PushHeader(
            adapter_id=name.removeprefix("adapters/"),
            config=_config(config),
            weights_bytes=len(self._weights),
            visibility=visibility_message(visibility),
            shared_with=shared_with,
            owner=owner,
            hold=hold,
            validate_only=validate_only,
            signature=signature,
            files_from=str(files_from),
            without_files=without_files,
        )

    def resumption(self) -> None:
        """A push is small: a broken one begins again."""

    def resume(self, received: None) -> None:
        """Never with anything."""

    def is_out_of_step(self, error: MotetError) -> bool:  # noqa: ARG002 - of the protocol
        """Never."""
        return False

    def messages(self) -> Iterator[push_pb2.PushVersionRequest]:
        """Header first, then chunks in order."""
        yield push_pb2.PushVersionRequest(header=self._header)
        for offset in range(0, len(self._weights), CHUNK_BYTES):
            chunk = push_pb2.PushChunk(data=self._weights[offset : offset + CHUNK_BYTES])
            yield push_pb2.PushVersionRequest(chunk=chunk)

    def read(self, response: push_pb2.PushVersionResponse) -> PushedVersion:
        """What the caller gets."""
        return pushed_from(response)


def _config(config: Mapping[str, Any] | str | bytes) -> bytes:
    if isinstance(config, bytes):
        return config
    if isinstance(config, str):
        return config.encode()
    # PEFT's LoraConfig.to_dict() has sets and enums, which PEFT writes as lists and text.
    return json.dumps(dict(config), default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(getattr(value, "value", value))


def _safetensors(tensors: Mapping[str, Any]) -> bytes:
    """The content of a safetensors file."""
    if not tensors:
        raise invalid_field("tensors", "is empty; give the adapter's tensors by name")
    entries: dict[str, Any] = {}
    pieces: list[bytes | memoryview] = []
    position = 0
    for name, tensor in tensors.items():
        dtype, shape, data = _plain_tensor(name, tensor)
        end = position + len(data)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        pieces.append(data)
        position = end
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join((len(head).to_bytes(8, "little"), head, *pieces))


def _plain_tensor(name: str, tensor: Any) -> tuple[str, list[int], bytes | memoryview]:
    """The safetensors dtype, shape and bytes of one tensor of numpy or torch."""
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise invalid_field(
            f"tensors[{name!r}]",
            f"is {dtype or type(tensor).__name__}; give float32, bfloat16 or float16 of numpy or torch",
        )
    shape = [int(size) for size in tensor.shape]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "is on the device meta, without values" if tensor.is_meta else f"is {tensor.layout}"
            raise invalid_field(f"tensors[{name!r}]", f"{kind}; give a dense tensor with values")
        values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
        return _DTYPES[dtype], shape, memoryview(values).cast("B")
    return _DTYPES[dtype], shape, tensor.tobytes()
