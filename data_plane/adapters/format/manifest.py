"""Reads manifests of packed adapters (docs/protocol.md) and verifies chunks. Does not trust its input. No torch."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from contract.ids import DIGEST_FORM, is_digest
from contract.packed_layout import (
    ITEMSIZE,
    READ_FORMATS,
    SCORE_HEAD,
    ModuleSize,
    RowsSize,
    ScoreHeadSize,
    arena_bytes,
    page_columns,
)
from contract.rope_scaling import RopeScaling, read_rope_scaling
from data_plane.adapters.kinds import MANIFEST_WORDS, kind_with
from data_plane.adapters.kinds.adapter_kind import AdapterKind
from data_plane.errors import AdapterCorrupt

# About 300 bytes per module; a very large model has 10 000 modules.
MAX_MANIFEST_BYTES = 16 << 20
# Each load reads its manifest in up to three places. Reading it takes Python's lock for milliseconds, beside steps.
KEPT_MANIFESTS = 4

_COLUMNS = "page_columns"
_MANIFEST_KEYS = {"base_fingerprint", "chunks", "dtype", "format", "kind"}
_INVOCATION = "alora_invocation_tokens"
_OPTIONAL_KEYS = {"companions", "num_tokens", "rope", SCORE_HEAD, _INVOCATION}  # the first is not the worker's
_HEAD_KEYS = {"has_bias", "in_features", "labels", "num_labels", "problem_type"}
_CHUNK_KEYS = {"modules", "name", "sha256", "size_bytes"}
_ROWS_KEYS = {"name", "num_rows", "width"}
_MODULE_KEYS = {"in_features", "name", "out_features", "rank", "scaling"}
_HASH = "_sha256"  # ends the key of a tensor's hash. Format 1 has one for each tensor, and names the parts so.


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One module of a chunk."""

    name: str  # module path in the transformers model
    rank: int
    scaling: float
    in_features: int
    out_features: int
    kind: AdapterKind
    is_embedding: bool = False

    def size(self, *, is_head: bool) -> ModuleSize:
        """What the module's size in an arena depends on."""
        num_vectors = sum(part.is_vector for part in self.kind.parts)
        return ModuleSize(self.rank, self.in_features, self.out_features, self.is_embedding, is_head, num_vectors)


@dataclass(frozen=True, slots=True)
class RowsEntry:
    """Rows of a chunk that replace those of the embedding or the head. A set may be cut over several chunks."""

    name: str  # module path in the transformers model
    num_rows: int  # in all chunks but the set's last a multiple of the ranks of a page
    width: int
    has_bias: bool

    @property
    def size(self) -> RowsSize:
        """What the rows' size in an arena depends on."""
        return RowsSize(self.num_rows, self.width, self.has_bias)


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """One chunk: a safetensors file with modules, or with rows."""

    name: str
    sha256: str
    size_bytes: int
    modules: tuple[ModuleEntry, ...]
    rows: tuple[RowsEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an adapter version consists of."""

    digest: str
    base_fingerprint: str
    kind: str
    dtype: str  # a key of ITEMSIZE
    chunks: tuple[ChunkEntry, ...]
    rope: RopeScaling | None = None  # its own rotary embedding; None: the base model's
    num_tokens: int | None = None  # of the adapter's own vocabulary; None: the base model's
    head: ScoreHeadSize | None = None  # in the chunk SCORE_HEAD, which is there if this is
    # The control plane says from which token on a row has the adapter; the worker needs no more than to know the key.
    alora_invocation_tokens: tuple[int, ...] = ()
    page_columns: int | None = None  # of the pages that chunks have the modules in; None: chunks of format 1

    def arena_bytes(self, heads: Collection[str]) -> int:
        """What the adapter takes of an arena, by the formula of docs/protocol.md. `heads`: the model's, by name."""
        return arena_bytes(*self._sizes(heads), self.head)

    def own_page_columns(self, heads: Collection[str]) -> int:
        """The columns of its pages, by the formula of docs/protocol.md."""
        sizes, _, rows = self._sizes(heads)
        return page_columns(sizes, rows)

    def _sizes(self, heads: Collection[str]) -> tuple[list[ModuleSize], str, list[RowsSize]]:
        modules = [module for chunk in self.chunks for module in chunk.modules]
        rows = [part.size for chunk in self.chunks for part in chunk.rows]
        return [module.size(is_head=module.name in heads) for module in modules], self.dtype, rows


def read_manifest(data: bytes, digest: str) -> Manifest:
    """The manifest whose SHA-256 is the digest. Raises AdapterCorrupt for anything else."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise AdapterCorrupt(f"adapter {digest}: manifest of {len(data)} bytes > {MAX_MANIFEST_BYTES}")
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise AdapterCorrupt(f"adapter {digest}: its manifest hashes to {actual}")
    return _parse(data, digest)


@functools.lru_cache(maxsize=KEPT_MANIFESTS)
def _parse(data: bytes, digest: str) -> Manifest:
    """The manifest. Raises AdapterCorrupt where this worker cannot read it."""
    try:
        raw = json.loads(data)
        given = raw if isinstance(raw, dict) else {}
        version = given.get("format", 1)
        if type(version) is not int or version not in READ_FORMATS:
            raise ValueError(f"format is {version!r}, this worker reads {', '.join(map(str, READ_FORMATS))}")
        is_paged = version > 1
        own = {_COLUMNS} if is_paged else set[str]()
        fields = _fields(raw, _MANIFEST_KEYS | own | (_OPTIONAL_KEYS & given.keys()), "manifest")
        if fields["kind"] not in MANIFEST_WORDS:
            raise ValueError(f"kind is {fields['kind']!r}, want one of {', '.join(MANIFEST_WORDS)}")
        if fields["dtype"] not in ITEMSIZE:
            raise ValueError(f"dtype is {fields['dtype']!r}, want one of {', '.join(ITEMSIZE)}")
        chunks = tuple(_chunk(entry, is_paged=is_paged) for entry in _list(fields["chunks"], "chunks"))
        names = [module.name for chunk in chunks for module in chunk.modules]
        if len(set(names)) != len(names):
            raise ValueError("a module is named twice")
        rope = read_rope_scaling(fields["rope"]) if "rope" in fields else None
        num_tokens = _count(fields["num_tokens"], "num_tokens") if "num_tokens" in fields else None
        head = _head(fields[SCORE_HEAD]) if SCORE_HEAD in fields else None
        empty = [chunk.name for chunk in chunks if not chunk.modules and not chunk.rows]
        if empty != ([] if head is None else [SCORE_HEAD]):
            raise ValueError(f"chunk {empty or SCORE_HEAD} has no module and no rows, which a score head's alone has")
        fingerprint = _hash(fields["base_fingerprint"])
        invocation = _token_ids(fields[_INVOCATION]) if _INVOCATION in fields else ()
        columns = _count(fields[_COLUMNS], _COLUMNS) if is_paged else None
        kind, dtype = fields["kind"], fields["dtype"]
        return Manifest(digest, fingerprint, kind, dtype, chunks, rope, num_tokens, head, invocation, columns)
    except (ValueError, RecursionError) as error:
        raise AdapterCorrupt(f"adapter {digest}: {error}") from error


def verify_chunk(chunk: ChunkEntry, data: bytes, digest: str) -> None:
    """Raise AdapterCorrupt if the bytes are not the chunk's. Every source calls this for every chunk that it gives."""
    if len(data) != chunk.size_bytes:
        raise AdapterCorrupt(f"adapter {digest}: chunk {chunk.name} has {len(data)} bytes, want {chunk.size_bytes}")
    actual = hashlib.sha256(data).hexdigest()
    if actual != chunk.sha256:
        raise AdapterCorrupt(f"adapter {digest}: chunk {chunk.name} hashes to {actual}, want {chunk.sha256}")


def _chunk(raw: Any, *, is_paged: bool) -> ChunkEntry:
    fields = _fields(raw, _CHUNK_KEYS | _given(raw, "rows"), "chunk")
    modules = tuple(_module(entry, is_paged=is_paged) for entry in _list(fields["modules"], "modules"))
    rows = tuple(_rows(entry, is_paged=is_paged) for entry in _list(fields.get("rows", []), "rows"))
    if modules and rows:
        raise ValueError(f"chunk {fields['name']!r} has modules and rows")
    return ChunkEntry(
        _text(fields["name"]), _hash(fields["sha256"]), _count(fields["size_bytes"], "size_bytes"), modules, rows
    )


def _rows(raw: Any, *, is_paged: bool) -> RowsEntry:
    hashes = set[str]() if is_paged else {"ids_sha256", "rows_sha256"} | _given(raw, "bias_sha256")
    fields = _fields(raw, _ROWS_KEYS | hashes | (_given(raw, "has_bias") if is_paged else set()), "set of rows")
    for key in hashes:
        _hash(fields[key])
    if fields.get("has_bias", True) is not True:
        raise ValueError(f"has_bias is {fields['has_bias']!r}, want true or no such key")
    return RowsEntry(
        name=_text(fields["name"]),
        num_rows=_count(fields["num_rows"], "num_rows"),
        width=_count(fields["width"], "width"),
        has_bias="bias_sha256" in fields or "has_bias" in fields,
    )


def _given(raw: Any, key: str) -> set[str]:
    """The key if it is there."""
    return {key} if isinstance(raw, dict) and key in raw else set()


def _head(raw: Any) -> ScoreHeadSize:
    fields = _fields(raw, _HEAD_KEYS, "score head")
    if not isinstance(fields["has_bias"], bool):
        raise ValueError(f"has_bias is {fields['has_bias']!r}, want true or false")
    num_labels, in_features = _count(fields["num_labels"], "num_labels"), _count(fields["in_features"], "in_features")
    return ScoreHeadSize(num_labels, in_features, fields["has_bias"])


def _module(raw: Any, *, is_paged: bool) -> ModuleEntry:
    given = set(raw) if isinstance(raw, dict) else set()
    hashes = set[str]() if is_paged else {key for key in given if key.endswith(_HASH)}
    own = {"parts"} if is_paged else hashes
    fields = _fields(raw, _MODULE_KEYS | own | ({"is_embedding"} & given), "module")
    if fields.get("is_embedding", True) is not True:
        raise ValueError(f"is_embedding is {fields['is_embedding']!r}, want true or no such key")
    scaling = fields["scaling"]
    if isinstance(scaling, bool) or not isinstance(scaling, int | float) or not math.isfinite(scaling):
        raise ValueError(f"scaling is {scaling!r}, want a finite number")
    for key in hashes:
        _hash(fields[key])
    parts = [_text(part) for part in _list(fields["parts"], "parts")] if is_paged else []
    if len(set(parts)) < len(parts):
        raise ValueError(f"{fields['name']!r} has a part twice")
    try:
        kind = kind_with(parts or [key.removesuffix(_HASH) for key in hashes])
    except ValueError as error:
        raise ValueError(f"{fields['name']!r} {error}") from error
    return ModuleEntry(
        name=_text(fields["name"]),
        rank=_count(fields["rank"], "rank"),
        scaling=float(scaling),
        in_features=_count(fields["in_features"], "in_features"),
        out_features=_count(fields["out_features"], "out_features"),
        kind=kind,
        is_embedding="is_embedding" in fields,
    )


def _fields(raw: Any, keys: set[str], what: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"a {what} is {type(raw).__name__}, want an object")
    if raw.keys() != keys:
        raise ValueError(f"keys {sorted(raw.keys() ^ keys)[:4]} of a {what} are missing or unknown")
    return raw


def _list(raw: Any, what: str) -> list[Any]:
    if not isinstance(raw, list):
        raise ValueError(f"{what} is {type(raw).__name__}, want a list")
    return raw


def _token_ids(raw: Any) -> tuple[int, ...]:
    ids = _list(raw, _INVOCATION)
    if not ids or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise ValueError(f"{_INVOCATION} is not a list of token ids")
    return tuple(ids)


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw:
        raise ValueError(f"a name is {raw!r}, want text")
    return raw


def _count(raw: Any, what: str) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not 1 <= raw < 1 << 48:
        raise ValueError(f"{what} is {raw!r}, want a positive integer")
    return raw


def _hash(raw: Any) -> str:
    if not isinstance(raw, str) or not is_digest(raw):
        raise ValueError(f"a hash is {raw!r}; {DIGEST_FORM}")
    return raw
