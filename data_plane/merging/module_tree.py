"""Where the tensors of a checkpoint's files lie in the module tree of transformers. No weight is read.

Adapters name modules of the tree. A checkpoint may call its tensors by other names, and may hold each expert of a
layer by itself where the tree has one stacked parameter: transformers' own conversions say which tensor is what.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from contract.expert_names import DOWN, GATE, UP
from data_plane.errors import ConfigError, UnsupportedModel
from data_plane.layers.context import StepContext
from data_plane.layers.lora_experts import LoraExperts
from data_plane.models.mixtures.parts import is_router, is_stacked
from data_plane.models.probe import head_and_embedding
from data_plane.plan import TargetKind, TargetModule

WEIGHT, BIAS = "weight", "bias"
STACKED_PARTS = {"gate_up_proj": (GATE, UP), "down_proj": (DOWN,)}  # of the stacked parameters of a layer's experts
_EXPERT = re.compile(r"\.experts\.([0-9]+)\.")


class Place(NamedTuple):
    """What a tensor of the checkpoint is in the module tree."""

    module: str  # of one expert: a name of contract/expert_names.py
    part: str  # the parameter's name: WEIGHT, BIAS, one of STACKED_PARTS


class ModuleTree:
    """The modules of one checkpoint's model."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigError, UnsupportedModel among them."""
        try:
            config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
        except Exception as error:
            raise ConfigError(f"transformers cannot read {model_dir / 'config.json'}: {error}") from error
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise UnsupportedModel(f"transformers has no causal language model of type {config.model_type}")
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]  # HF's stubs
        self.head_name, self.embedding_name = head_and_embedding(self.model)
        self._parameters = self.model.state_dict()
        conversions = get_model_conversion_mapping(self.model)
        self._converters = [one for one in conversions if isinstance(one, WeightConverter)]
        self._renamings = [one for one in conversions if isinstance(one, WeightRenaming)]

    @property
    def are_tied(self) -> bool:
        """Whether the head's weight is the embedding's."""
        if self.head_name is None or self.embedding_name is None:
            return False
        head, embedding = (self.model.get_submodule(name) for name in (self.head_name, self.embedding_name))
        return head.weight is embedding.weight

    def targets(self) -> list[TargetModule]:
        """Every module with a matrix that adapters could name, as a worker reports them."""
        found: list[TargetModule] = []
        for name, module in self.model.named_modules():
            if isinstance(module, Conv1D):
                found.append(TargetModule(name, TargetKind.LINEAR, module.nx, module.nf))
            elif isinstance(module, nn.Linear):
                kind = TargetKind.HEAD if name == self.head_name else TargetKind.LINEAR
                found.append(TargetModule(name, kind, module.in_features, module.out_features))
            elif isinstance(module, nn.Embedding):
                reason = "" if name == self.embedding_name else "it is not the embedding that tokens are looked up in"
                sides = (module.num_embeddings, module.embedding_dim)
                found.append(TargetModule(name, TargetKind.EMBEDDING, *sides, reason))
            elif is_router(module):
                experts, hidden = next(module.parameters(recurse=False)).shape
                found.append(TargetModule(name, TargetKind.ROUTER, hidden, experts))
            elif is_stacked(module):
                found += _experts(module, name)
        return found

    def place_of(self, key: str) -> Place | None:
        """Where a checkpoint's tensor belongs; None if the tree has it in another form, or not at all."""
        target, pattern = rename_source_key(
            key, self._renamings, self._converters, self.model.base_model_prefix, self._parameters
        )
        if target not in self._parameters:
            return None
        module, _, part = target.rpartition(".")
        if pattern is None:
            return Place(module, part)
        converter = next(one for one in self._converters if pattern in one.source_patterns)
        expert, projections = _EXPERT.search(key), STACKED_PARTS.get(part, ())
        is_plain = [type(step) for step in converter.operations] == [MergeModulelist, Concatenate][: len(projections)]
        if expert is None or not is_plain or len(converter.source_patterns) != len(projections):
            return None
        projection = projections[converter.source_patterns.index(pattern)]
        return Place(f"{module}.{expert[1]}.{projection}", WEIGHT)

    def is_transposed(self, module: str) -> bool:
        """Whether a matrix lies as [in, out]."""
        if module == self.embedding_name:
            return True
        try:
            return isinstance(self.model.get_submodule(module), Conv1D)
        except AttributeError:
            return False  # one expert of a stack

    def expert_views(self, place: Place, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views [out, in] of a stacked parameter by the modules that adapters name; empty for another tensor."""
        experts: Any = self.model.get_submodule(place.module) if place.part in STACKED_PARTS else None
        if experts is None or stacked.dim() != 3 or not hasattr(experts, "is_transposed"):
            return {}
        found = {}
        for index, matrix in enumerate(stacked):
            weight = matrix.T if experts.is_transposed else matrix
            projections = STACKED_PARTS[place.part]
            for which, projection in enumerate(projections):
                half = len(weight) // len(projections)
                rows = slice(which * half, (which + 1) * half) if experts.is_concatenated else slice(which, None, 2)
                view = weight if len(projections) == 1 else weight[rows]
                found[f"{place.module}.{index}.{projection}"] = view
        return found


def _experts(module: nn.Module, name: str) -> list[TargetModule]:
    try:
        return LoraExperts(module, name, StepContext()).targets
    except ValueError:
        return []  # no gated linears: adapters on them are refused, as by a worker
