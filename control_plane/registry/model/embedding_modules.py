"""The embedding and the head of a base checkpoint: their names in the module tree, shapes and values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.registry.model.served_modules import ModuleKind, ServedModule

_EMBEDDING = re.compile(r"^(?:[a-z_0-9]+\.)*(?P<name>embed_tokens|embed_in|word_embeddings|wte)\.weight\Z")
_HEAD = re.compile(r"^(?:[a-z_0-9]+\.)*(?:lm_head|embed_out)\.(?P<part>weight|bias)\Z")
_HEAD_MODULE = "lm_head"  # in transformers' tree, whatever the checkpoint calls it
_SLICE_VALUES = 4 << 20  # compared at a time


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Where a tensor's bytes lie."""

    path: Path
    dtype: str  # of safetensors
    shape: tuple[int, ...]
    start: int  # bytes into the file


@dataclass(frozen=True, slots=True)
class EmbeddingModule:
    """The embedding or lm_head."""

    is_input: bool  # the embedding, which leads from the vocabulary; False: lm_head
    weight: CheckpointTensor  # [vocabulary, hidden]; the embedding's where the head is tied to it
    bias: CheckpointTensor | None = None  # [vocabulary]; of some heads

    @property
    def linear_shape(self) -> tuple[int, int]:
        """(out_features, in_features) as an adapter has them: an embedding leads from the vocabulary."""
        vocab_size, hidden = self.weight.shape
        return (hidden, vocab_size) if self.is_input else (vocab_size, hidden)


def find_embedding_modules(
    config: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor], layers_path: str
) -> dict[str, EmbeddingModule]:
    """Both by module path, or only what is known for certain."""
    embeddings = [(match["name"], tensors[name]) for name in tensors if (match := _EMBEDDING.match(name))]
    found = [(match["part"], tensors[name]) for name in tensors if (match := _HEAD.match(name))]
    heads, biases = ([tensor for part, tensor in found if part == wanted] for wanted in ("weight", "bias"))
    if len(embeddings) != 1 or len(heads) > 1 or len(biases) > 1 or len(embeddings[0][1].shape) != 2:
        return {}
    name, weight = embeddings[0]
    is_tied = config.get("tie_word_embeddings") is True or not heads
    return {
        f"{layers_path.rpartition('.')[0]}.{name}": EmbeddingModule(True, weight),
        _HEAD_MODULE: EmbeddingModule(False, weight if is_tied else heads[0], biases[0] if biases else None),
    }


def find_own(tensors: Mapping[str, CheckpointTensor], name: str, module: ServedModule) -> EmbeddingModule | None:
    """The tensors of a head or an embedding of that path; None unless there is exactly one weight that they can be.

    A checkpoint may leave out the beginning of a path, or have more of it. A head without a weight is tied to the
    embedding, whose path is another one: it is not found.
    """
    is_input = module.kind is ModuleKind.EMBEDDING
    rows, columns = module.in_features, module.out_features
    shape = (rows, columns) if is_input else (columns, rows)
    weights = [t for tensor, t in tensors.items() if t.shape == shape and _is_of(tensor, name, "weight")]
    biases = [t for tensor, t in tensors.items() if t.shape == shape[:1] and _is_of(tensor, name, "bias")]
    if len(weights) != 1 or len(biases) > 1:
        return None
    return EmbeddingModule(is_input, weights[0], biases[0] if biases and not is_input else None)


class TensorsByModule:
    """The weights or the biases of a checkpoint by module path. A look-up costs the same in any checkpoint."""

    def __init__(self, tensors: Mapping[str, CheckpointTensor], part: str) -> None:
        end = f".{part}"
        self._by_path = {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
        self._by_suffix: dict[str, list[str]] = {}
        for path in self._by_path:
            for suffix in _suffixes(path):
                self._by_suffix.setdefault(suffix, []).append(path)

    def find(self, module: str) -> CheckpointTensor | None:
        """The tensor of a module of that path; None unless there is exactly one that it can be.

        A checkpoint may leave out the beginning of a path, or have more of it.
        """
        paths = set(self._by_suffix.get(module, []))
        paths.update(suffix for suffix in _suffixes(module) if suffix in self._by_path)
        return self._by_path[paths.pop()] if len(paths) == 1 else None


def _suffixes(path: str) -> list[str]:
    """ "a.b.c" gives "a.b.c", "b.c" and "c"."""
    parts = path.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _is_of(tensor: str, module: str, part: str) -> bool:
    path = tensor.removesuffix(f".{part}")
    return path != tensor and (path == module or path.endswith(f".{module}") or module.endswith(f".{path}"))
