"""Turns the files of an adapter into the packed layout of docs/protocol.md, checking everything on the way.

The names of the files say whether they are PEFT's or, read by registry/trtllm, TensorRT-LLM's.

Runs in a child process (registry/packing). A few MiB of an adapter are in memory at a time, whatever its size. The
same input gives the same bytes, hence the same digest, on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from contract.expert_names import of_all
from contract.packed_layout import FORMAT, SCORE_HEAD, arena_bytes, chunk_name, page_columns
from contract.rope_scaling import RopeScaling
from control_plane.errors import FieldViolation
from control_plane.registry.adapter_files import (
    CONFIG_FILE as CONFIG_FILE,
    PEFT,
    TRTLLM,
    WEIGHTS_FILE as WEIGHTS_FILE,
    AdapterFormat,
    format_of,
)
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.base_names import base_warnings
from control_plane.registry.model.served_modules import NOTHING_REPORTED, ModuleKind, Modules
from control_plane.registry.peft.adapter_config import MAX_CONFIG_BYTES, read_adapter_config
from control_plane.registry.peft.chunks.chunk_writer import (
    ChunkTensor,
    PackedTensor,
    WrittenChunk,
    begin_chunk,
    write_chunk,
)
from control_plane.registry.peft.chunks.paged_tensor import PagedMatrix, PagedTensor
from control_plane.registry.peft.chunks.tensor_sources import FileSource, TensorSource
from control_plane.registry.peft.experts.tensors import expert_tensors
from control_plane.registry.peft.fields.activation import (
    FIELD as INVOCATION_TOKENS,
    check_activated,
    read_invocation_tokens,
)
from control_plane.registry.peft.fields.long_context import read_rope
from control_plane.registry.peft.kinds.score_head import ScoreHead, head_entries, plan_score_head
from control_plane.registry.peft.module_plans import ModulePlan, plan_modules
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.rows.row_chunks import ReplacedRows, row_chunks
from control_plane.registry.peft.rows.row_sets import find_row_sets
from control_plane.registry.peft.rows.row_tensors import take_row_tensors
from control_plane.registry.peft.safetensors_header import TensorEntry, read_header, refuse, shorten
from control_plane.registry.peft.target_modules import TargetModules
from control_plane.registry.peft.tensor_names import own_biases, with_body_prefix
from control_plane.registry.peft.trained_biases import with_trained_biases
from control_plane.registry.trtllm.rows import opened_rows
from control_plane.signatures.verdict import SignatureVerdict

FILE_NAMES = PEFT.required


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """One chunk as the manifest has it, and the file that it is in."""

    path: Path = field(compare=False)
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """A packed adapter, but for the bytes of its chunks."""

    digest: str
    manifest: bytes
    chunks: tuple[PackedChunk, ...]
    kind: str
    max_rank: int
    size_bytes: int  # manifest and chunks
    arena_bytes: int
    target_modules: tuple[str, ...]  # sorted; all experts of a layer are one (contract/expert_names.py)
    num_tokens: int | None = None  # of its own vocabulary; None: the base model's
    num_rows: int = 0  # rows of embedding and head that it replaces or adds
    min_rank: int = 0  # of a module
    parts: tuple[str, ...] = ()  # kinds of tensors that its modules have, sorted; "experts" where it is on experts
    signature: SignatureVerdict | None = None  # of the files that it was packed from; None: they have none
    companions: tuple[str, ...] = ()  # documents beside the weights, the last of its chunks (registry/companions)
    context_length: int = 0  # tokens that its own rotary embedding was trained for; 0: it has the base model's
    labels: tuple[str, ...] = ()  # of its score head; empty: it has none
    problem_type: str = ""  # what the head's logits mean, in transformers' words; empty: not said
    alora_invocation_tokens: tuple[int, ...] = ()  # it acts from them on; empty: on all tokens
    warnings: tuple[str, ...] = ()  # what its owner should know, and what is not a reason to refuse it


def ingest(
    files: Mapping[str, Path],
    base_model: BaseModel,
    *,
    max_adapter_bytes: int,
    directory: Path,
    reported: Modules = NOTHING_REPORTED,
    check: Callable[[], None] = lambda: None,
) -> PackedInfo:
    """Check the adapter in full and write its chunks into `directory`, which is empty.

    Raises InvalidAdapter with all that is wrong with the configuration and the tensors; values are read where both are
    right.

    `files` maps the names of adapter_files.py to local files that the server wrote or chose.
    `reported` is what workers report of the model's modules. `check` is called every few MiB, and may
    raise to end the work.
    """
    targets, problems = TargetModules.of(base_model, reported), Problems()
    written = format_of(files)
    _check_file_names(files, written, problems)
    if written is TRTLLM:
        problems.raise_all()
        with opened_rows(files, targets, max_adapter_bytes, problems) as rows:
            return _pack(rows.source, rows.kind, rows.modules, base_model, directory, check)
    config = head = None
    if CONFIG_FILE in files:
        with files[CONFIG_FILE].open("rb") as config_file:
            config = read_adapter_config(config_file.read(MAX_CONFIG_BYTES + 1), problems)
    if WEIGHTS_FILE not in files:
        problems.raise_all()
    with files[WEIGHTS_FILE].open("rb") as file, tempfile.TemporaryFile(dir=directory) as ordered:
        rope, invocation = None, tuple[int, ...]()
        with problems.collected():
            rope = None if config is None else read_rope(config.rope, base_model)
        with problems.collected():
            given = None if config is None else config.alora_invocation_tokens
            invocation = read_invocation_tokens(given, base_model.vocab_size)
        with problems.collected():
            entries = _read_entries(file, targets, max_adapter_bytes)
            row_tensors, entries = take_row_tensors(entries, config, targets, problems)
            biases = own_biases(entries)
            of_head = head_entries(entries)
            others = {entry.name for entry in (*biases.values(), *of_head.values())}
            adapters = with_body_prefix({n: e for n, e in entries.items() if n not in others}, targets)
            found = expert_tensors(file, adapters, config, targets, ordered, problems, check)
            modules = plan_modules(config, found, targets, problems, row_tensors.num_tokens)
            if config is not None:
                modules = with_trained_biases(file, modules, biases, config, targets, problems)
                head = plan_score_head(of_head, config.label_names, targets, problems)
            row_sets = find_row_sets(file, row_tensors, modules, targets, problems, check)
            if invocation:
                beside = {"a rotary embedding of its own": rope, "rows of its own": row_sets, "a score head": head}
                check_activated(modules, [name for name, found in beside.items() if found], problems)
        problems.raise_all()
        assert config is not None, "a configuration that cannot be read is a problem"
        num_tokens = None if row_tensors.num_tokens == base_model.vocab_size else row_tensors.num_tokens
        replaced = ReplacedRows(tuple(row_sets), num_tokens, file, found.source)
        source, kind = FileSource(found.source), config.manifest_kind
        packed = _pack(source, kind, modules, base_model, directory, check, rope, replaced, head, invocation)
        return replace(packed, warnings=base_warnings(config.base_name, base_model.model_dir))


def _check_file_names(files: Mapping[str, Path], written: AdapterFormat, problems: Problems) -> None:
    for name in sorted(set(files) - set(written.names)):
        belong = " and ".join(written.names)
        problems.add(FieldViolation(shorten(name), f"only {belong} belong to an adapter of {written.written_by}"))
    for name in written.required:
        if name not in files:
            problems.add(FieldViolation(name, f"is missing; {written.written_by} writes it"))


def _read_entries(file: BinaryIO, targets: TargetModules, max_adapter_bytes: int) -> dict[str, TensorEntry]:
    size = os.fstat(file.fileno()).st_size
    if size > max_adapter_bytes:
        raise refuse(
            WEIGHTS_FILE,
            f"{size} bytes, limit {max_adapter_bytes}; raise --max-adapter-bytes, or save with "
            "save_embedding_layers=False: PEFT else stores the base's weight beside adapters on embedding and head",
        )
    # Room for other kinds of adapters too: they are refused by their tensors' names, not by a count.
    max_tensors = 4 * max(len(targets.served), len(targets.reported)) + 64
    return read_header(file, size, max_tensors=max_tensors)


def _pack(
    source: TensorSource,
    kind: str,
    modules: list[ModulePlan],
    base_model: BaseModel,
    directory: Path,
    check: Callable[[], None],
    rope: RopeScaling | None = None,
    rows: ReplacedRows | None = None,
    head: ScoreHead | None = None,
    alora_invocation_tokens: tuple[int, ...] = (),
) -> PackedInfo:
    row_sets, num_tokens = ((), None) if rows is None else (rows.sets, rows.num_tokens)
    groups: dict[int | None, list[ModulePlan]] = {}
    for plan in modules:
        groups.setdefault(plan.layer, []).append(plan)
    problems = Problems()
    sizes, row_sizes = [plan.size for plan in modules], [part.size for part in row_sets]
    columns = page_columns(sizes, row_sizes)
    described, chunks = _pack_modules(groups, source, base_model.dtype, columns, directory, check, problems)
    if rows is not None:
        of_rows, written_rows = _pack_rows(rows, source, base_model.dtype, directory, check, problems)
        described += of_rows
        chunks += written_rows
    if head is not None:
        with problems.collected():
            chunk = _pack_head(head, source, directory / SCORE_HEAD, check)
            chunks.append(chunk)
            of_head = {"modules": [], "name": SCORE_HEAD, "sha256": chunk.sha256, "size_bytes": chunk.size_bytes}
            described.append(of_head)
    problems.raise_all()
    document = {
        **({} if head is None else {SCORE_HEAD: head.described}),
        "base_fingerprint": base_model.fingerprint,
        "chunks": described,
        "dtype": base_model.dtype,
        "format": FORMAT,
        "kind": kind,
        "page_columns": columns,
        **({} if rope is None else {"rope": rope.document()}),
        **({} if num_tokens is None else {"num_tokens": num_tokens}),
        **({INVOCATION_TOKENS: alora_invocation_tokens} if alora_invocation_tokens else {}),
    }
    manifest = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    return PackedInfo(
        digest=hashlib.sha256(manifest).hexdigest(),
        manifest=manifest,
        chunks=tuple(chunks),
        kind=kind,
        max_rank=max((plan.rank for plan in modules), default=0),
        min_rank=min((plan.rank for plan in modules), default=0),
        parts=_parts(modules, has_rows=bool(row_sets)),
        size_bytes=len(manifest) + sum(chunk.size_bytes for chunk in chunks),
        arena_bytes=arena_bytes(sizes, base_model.dtype, row_sizes, head.size if head else None),
        target_modules=tuple(sorted({of_all(plan.name) for plan in modules} | {part.name for part in row_sets})),
        num_tokens=num_tokens,
        num_rows=sum(len(part.ids) for part in row_sets),
        context_length=0 if rope is None else rope.context_length,
        labels=() if head is None else head.labels,
        problem_type="" if head is None else head.problem_type,
        alora_invocation_tokens=alora_invocation_tokens,
    )


def _pack_modules(
    groups: Mapping[int | None, list[ModulePlan]],
    source: TensorSource,
    dtype: str,
    columns: int,
    directory: Path,
    check: Callable[[], None],
    problems: Problems,
) -> tuple[list[dict[str, Any]], list[PackedChunk]]:
    """Write the chunks of modules, one for each layer. The manifest's words for them, and the chunks."""
    layers = sorted(layer for layer in groups if layer is not None)
    begun: list[tuple[int | None, Path, Future[WrittenChunk]]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="motet-hash") as hashing:
        for index, layer in enumerate([*layers, *([None] if None in groups else [])]):
            path = directory / str(index)
            tensors = _tensors(groups[layer], dtype, columns)
            with problems.collected():
                begun.append((layer, path, begin_chunk(path, source, tensors, check, hashing)))
    described, chunks = [], []
    for layer, path, future in begun:
        written = future.result()
        chunks.append(PackedChunk(path, written.size_bytes, written.sha256))
        described.append(
            {
                "modules": [_described(plan) for plan in groups[layer]],
                "name": chunk_name(layer),
                "sha256": written.sha256,
                "size_bytes": written.size_bytes,
            }
        )
    return described, chunks


def _pack_rows(
    rows: ReplacedRows,
    source: TensorSource,
    dtype: str,
    directory: Path,
    check: Callable[[], None],
    problems: Problems,
) -> tuple[list[dict[str, Any]], list[PackedChunk]]:
    """Write the chunks of rows. The manifest's words for them, and the chunks."""
    described: list[dict[str, Any]] = []
    chunks = []
    for part in row_chunks(rows.sets):
        path, written = directory / part.chunk_name, None
        with path.open("x+b") as out, problems.collected():
            written = write_chunk(out, source, part.tensors(rows, dtype), check)
        if written is None:
            continue
        chunks.append(PackedChunk(path, written.size_bytes, written.sha256))
        own = {"name": part.chunk_name, "sha256": written.sha256, "size_bytes": written.size_bytes}
        described.append({"modules": [], "rows": [part.described()], **own})
    return described, chunks


def _parts(modules: list[ModulePlan], *, has_rows: bool) -> tuple[str, ...]:
    parts = {part.packed_name for plan in modules for part, _ in plan.tensors} | ({"rows"} if has_rows else set())
    return tuple(sorted(parts | {"experts" for plan in modules if plan.kind is ModuleKind.EXPERT}))


def _pack_head(head: ScoreHead, source: TensorSource, path: Path, check: Callable[[], None]) -> PackedChunk:
    with path.open("x+b") as out:
        written = write_chunk(out, source, head.tensors, check)
    return PackedChunk(path, written.size_bytes, written.sha256)


def _tensors(plans: list[ModulePlan], dtype: str, columns: int) -> list[ChunkTensor]:
    """What the chunk of these modules has: all matrices in one tensor, then the vectors of each module."""
    matrices = [matrix for plan in plans for matrix in _matrices(plan)]
    vectors = [
        PackedTensor(f"{plan.name}.{part.packed_name}", entry, "float32", size=plan.packed_size(part))
        for plan in plans
        for part, entry in plan.tensors
        if part.is_vector
    ]
    return [PagedTensor(matrices, columns, dtype), *vectors]


def _matrices(plan: ModulePlan) -> list[PagedMatrix]:
    """A and B; zeros for a module that has vectors alone."""
    found = {part.packed_name: (part, entry) for part, entry in plan.tensors}
    matrices = []
    for name, width in (("a", plan.in_features), ("b", plan.out_features)):
        part, entry = found.get(name, (None, None))
        matrices.append(PagedMatrix(entry, plan.rank, width, part is not None and part.is_transposed))
    return matrices


def _described(plan: ModulePlan) -> dict[str, Any]:
    """The manifest's words for a module."""
    return {
        **({"is_embedding": True} if plan.is_embedding else {}),
        "in_features": plan.in_features,
        "name": plan.name,
        "out_features": plan.out_features,
        "parts": [part.packed_name for part, _ in plan.tensors],
        "rank": plan.rank,
        "scaling": float(plan.scaling),
    }
