"""The documents that a version keeps of what its adapter brings, and the keys of its manifest that name them.

They lie in the blob after the chunks of weights, in the order of their names. Workers read neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from control_plane.registry.peft.ingest import PackedChunk, PackedInfo

CHAT, GENERATION, TOKENIZER = "chat_template", "generation_config", "tokenizer"
PARTS = (CHAT, GENERATION, TOKENIZER)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What is in effect where a request of the adapter sets nothing."""

    sampling: Mapping[str, float]  # by the names of SamplingParams
    max_tokens: int | None = None  # None: the server's default
    eos_token_ids: tuple[int, ...] | None = None  # in place of the base model's; None: the base model's


NO_DEFAULTS = GenerationDefaults({})


@dataclass(frozen=True, slots=True)
class ChatTemplateDocument:
    """A template, and the special tokens that it names."""

    template: str
    special_tokens: Mapping[str, str]
    response_template: Mapping[str, Any] | None = None  # None: the base checkpoint's


def encode(document: Mapping[str, Any]) -> bytes:
    """The document as bytes: the same for the same values, on every machine."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def encode_defaults(defaults: GenerationDefaults) -> bytes:
    return encode(asdict(defaults))


def decode_defaults(data: bytes) -> GenerationDefaults:
    """Read what `encode_defaults` wrote."""
    values = json.loads(data)
    eos = values["eos_token_ids"]
    return GenerationDefaults(values["sampling"], values["max_tokens"], None if eos is None else tuple(eos))


def decode_chat(data: bytes) -> ChatTemplateDocument:
    """Read a chat template's document."""
    return ChatTemplateDocument(**json.loads(data))


def with_documents(packed: PackedInfo, documents: Mapping[str, bytes], directory: Path) -> PackedInfo:
    """The adapter with these documents, which are written into the directory: another version, of another digest.

    Without documents the adapter is as it was.
    """
    if not documents:
        return packed
    chunks, listed = list(packed.chunks), []
    for name, data in sorted(documents.items()):
        path = directory / f"{name}.document"
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        chunks.append(PackedChunk(path, len(data), digest))
        listed.append({"name": name, "sha256": digest, "size_bytes": len(data)})
    manifest = encode({**json.loads(packed.manifest), "companions": listed})
    return replace(
        packed,
        digest=hashlib.sha256(manifest).hexdigest(),
        manifest=manifest,
        chunks=tuple(chunks),
        size_bytes=packed.size_bytes + len(manifest) - len(packed.manifest),  # of what caches and workers read
        companions=tuple(sorted(documents)),
    )
