"""Loads a checkpoint with transformers, checks that it can be served, and puts our layers into it."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from data_plane.adapters.sites import Site, SiteKind
from data_plane.errors import ConfigError, UnsupportedModel
from data_plane.layers.attention import ATTENTION_NAME
from data_plane.layers.context import StepContext
from data_plane.layers.lora_embedding import LoraEmbedding
from data_plane.layers.lora_linear import LoraLinear, replace_linears, replace_module
from data_plane.models.fusion import fuse_model
from data_plane.models.limits import context_limit
from data_plane.models.probe import PROBE_NAME, ModelProbe, Recorder, probe_model, register_probe

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose linears take adapters and whose attention waits for its cache."""

    model: PreTrainedModel
    probe: ModelProbe
    context: StepContext
    context_limit: int  # tokens that the model computes
    dtype: torch.dtype

    def sites(self) -> list[Site]:
        """Where adapters may add, in the order of the layers."""
        return [
            site
            for module in self.model.modules()
            if isinstance(module, LoraLinear | LoraEmbedding)
            for site in module.sites
        ]

    def base_weights(self) -> ModelWeights:
        """The weights that the sites add to."""
        return ModelWeights(self.model)

    @torch.inference_mode()
    def logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Logits [len(kept), vocab] of the tokens at `kept` (int64) of a packed step; ids are int64 [num_tokens].

        The step was begun in `context`; its KV is written on the way.
        """
        output = self.model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            logits_to_keep=kept,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class ModelWeights:
    """The sites of a loaded model by name (data_plane.adapters.base_weights.BaseWeights)."""

    def __init__(self, model: nn.Module) -> None:
        self._linears = {
            name: (module, index)
            for module in model.modules()
            if isinstance(module, LoraLinear)
            for index, name in enumerate(module.site_names)
        }
        self._embeddings = {
            module.sites[0].name: module for module in model.modules() if isinstance(module, LoraEmbedding)
        }

    def weight(self, site_name: str) -> torch.Tensor:
        """See BaseWeights."""
        if site_name in self._embeddings:
            return self._embeddings[site_name].weight.detach().T
        linear, index = self._linears[site_name]
        return linear.site_weight(index)

    def bias(self, site_name: str) -> torch.Tensor | None:
        """See BaseWeights."""
        if site_name in self._embeddings:
            return None
        linear, index = self._linears[site_name]
        return linear.site_bias(index)


def load_model(model_dir: Path, dtype: str, device: torch.device) -> LoadedModel:
    """The checkpoint in `model_dir`, ready for its KV cache. Raises ConfigError, UnsupportedModel among them.

    dtype "auto" is the checkpoint's own. Only safetensors are read and no code of the checkpoint is run.
    """
    config = _read_config(model_dir)
    torch_dtype = resolve_dtype(config, dtype)
    if device.type == "cpu" and torch_dtype == torch.bfloat16 and not _has_bfloat16():
        # Measured with AVX-512 alone: products of 32 tokens at 20 to 25 GFLOP/s of a core, 63 to 77 in float32.
        logger.warning(
            "this CPU has no bfloat16 arithmetic and emulates it: a batch takes about three times as long as in "
            "float32; --dtype float32 for control plane and worker takes twice the memory"
        )
    if getattr(config.get_text_config(), "alibi", False):
        raise UnsupportedModel(f"model type {config.model_type}: ALiBi attention is not served")
    model = _read_weights(model_dir, config, torch_dtype).to(device).eval()  # type: ignore[arg-type]  # HF's stubs
    model.requires_grad_(False)
    limit = context_limit(config)
    try:
        probe = probe_model(model, limit)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"model type {config.model_type}: a forward pass of packed tokens failed: {error}"
        ) from error
    context = StepContext()
    fused = fuse_model(model, probe, context, limit)
    model.set_attn_implementation(ATTENTION_NAME)
    replace_linears(model, fused.linear_names, context)
    _replace_head(model, probe, context)
    _replace_embedding(model, probe, context)
    logger.info(
        "model loaded type=%s dtype=%s device=%s layers=%d linears=%d",
        config.model_type,
        torch_dtype,
        device,
        len(probe.attention_layers),
        len(probe.linear_names),
    )
    return LoadedModel(model, fused, context, limit, torch_dtype)


def resolve_dtype(config: PretrainedConfig, dtype: str) -> torch.dtype:
    """The element type to serve in."""
    if dtype != "auto":
        return DTYPES[dtype]
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    if own not in DTYPES.values():
        raise ConfigError(f"config.json: dtype {own} is not served; set --dtype float32, bfloat16 or float16")
    assert isinstance(own, torch.dtype)
    return own


def _replace_head(model: PreTrainedModel, probe: ModelProbe, context: StepContext) -> None:
    """Let adapters add to the head, and pack its weight unless the embedding reads it too: then a second copy would
    cost more than it saves."""
    if probe.head_name is None:
        return
    head = model.get_submodule(probe.head_name)
    assert isinstance(head, nn.Linear), f"{probe.head_name} is a {type(head).__name__}"
    replacement = LoraLinear([head], [probe.head_name], context, kind=SiteKind.HEAD)
    if head.weight is not model.get_input_embeddings().weight:
        replacement.pack_weight()
    replace_module(model, probe.head_name, replacement)


def _replace_embedding(model: PreTrainedModel, probe: ModelProbe, context: StepContext) -> None:
    if probe.embedding_name is None:
        return
    embedding = model.get_submodule(probe.embedding_name)
    assert isinstance(embedding, nn.Embedding), f"{probe.embedding_name} is a {type(embedding).__name__}"
    replace_module(model, probe.embedding_name, LoraEmbedding(embedding, probe.embedding_name, context))


def _has_bfloat16() -> bool:
    """Whether products in bfloat16 are native; taken for granted where it is not an x86."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return not is_x86 or bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _read_config(model_dir: Path) -> PretrainedConfig:
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"--model: {model_dir} holds no config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise UnsupportedModel(f"--model: transformers cannot read {model_dir / 'config.json'}: {error}") from error
    return config


def _read_weights(model_dir: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model on the CPU; refused if any weight is missing from the checkpoint."""
    register_probe(Recorder())
    model: Any
    info: Any
    try:
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]  # a pair, by output_loading_info
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation=PROBE_NAME,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        reason = f"cannot be loaded: {error}"
        if isinstance(error, KeyError) and error.args == (PROBE_NAME,):
            reason = "its code does not call transformers' attention interface, so that its attention cannot be paged"
        raise UnsupportedModel(f"model type {config.model_type}: {reason}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            raise ConfigError(
                f"--model: {model_dir}: {kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind]))[:5])}"
            )
    if info.get("unexpected_keys"):
        logger.warning("checkpoint holds weights the model lacks keys=%s", sorted(info["unexpected_keys"])[:5])
    assert isinstance(model, PreTrainedModel)
    return model
