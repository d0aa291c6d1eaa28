"""Loads a checkpoint with transformers, checks that it can be served, and puts our layers into it."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from contract.checkpoints.quantization import TWICE_QUANTIZED
from contract.context_length import LENGTH_KEYS
from contract.expert_names import of_all
from contract.fingerprint import FP8_WEIGHTS, NOT_QUANTIZED
from contract.packed_layout import ITEMSIZE
from data_plane.errors import ConfigError, UnsupportedModel
from data_plane.layers.attention import ATTENTION_NAME
from data_plane.layers.context import StepContext
from data_plane.layers.lora_embedding import LoraEmbedding
from data_plane.layers.lora_experts import LoraExperts
from data_plane.layers.lora_linear import LoraLinear, replace_linears, replace_module
from data_plane.layers.lora_router import LoraRouter
from data_plane.layers.packed_weight import NativeWeight, SharedWeight
from data_plane.layers.transposed_linear import replace_transposed
from data_plane.models.checkpoint.quantized import quantization_of, read_dequantized
from data_plane.models.fp8.linears import quantize_linears
from data_plane.models.fp8.refusals import check_dtype
from data_plane.models.fusion import fuse_model
from data_plane.models.limits import context_limit
from data_plane.models.mixtures.adapters import add_adapters
from data_plane.models.model_probe import ModelProbe, probe_model, watching_hidden
from data_plane.models.probe import NUM_TOKENS, PROBE_NAME, Recorder, register_probe, run_probe
from data_plane.models.slot_rotary import SlotRotary, replace_rotary, rotary_of
from data_plane.models.stacking import StackedLayers, stack_layers
from data_plane.plan import TargetKind, TargetModule
from kernels.fp8 import Fp8Rows
from kernels.native import has_native

logger = logging.getLogger(__name__)

ReadWeights = Callable[[Path, PretrainedConfig, torch.dtype], PreTrainedModel]
_UNNAMED_LENGTH = 2048  # tokens that a model is checked for if its configuration names no length
_MAX_ERROR_CHARS = 300
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose linears take adapters. The engine attaches its KV cache."""

    model: PreTrainedModel
    probe: ModelProbe
    context: StepContext
    context_limit: int  # tokens that the model computes
    dtype: torch.dtype
    stacked: StackedLayers | None = None  # on a CPU, where all layers are of the fused shape
    rotary: SlotRotary | None = None  # None: the model has no rotary embedding for all its layers

    def targets(self) -> list[TargetModule]:
        """Where adapters may add, in the order of the layers."""
        found: list[TargetModule] = []
        for module in self.model.modules():
            if isinstance(module, LoraLinear | LoraEmbedding):
                found += module.targets
            elif isinstance(module, LoraExperts):
                found += [one for target in module.targets for one in target.each()]
            elif isinstance(router := getattr(module, "lora", None), LoraRouter):
                found.append(router.target)
        return found

    def base_weights(self) -> ModelWeights:
        """The weights that the target modules add to."""
        return ModelWeights(self.model)

    def has_native_linears(self) -> bool:
        """Whether every linear that takes adapters is multiplied by native code."""
        linears = [module for module in self.model.modules() if isinstance(module, LoraLinear)]
        return bool(linears) and all(isinstance(linear.packed, NativeWeight | SharedWeight) for linear in linears)

    @torch.inference_mode()
    def logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Logits [len(kept), vocab] of the tokens at `kept` (int64) of a packed step; ids are int64 [num_tokens].

        The step was begun in `context`; its KV is written on the way.
        """
        direct = None if self.stacked is None else self.stacked.direct
        if direct is not None and direct.is_proven:
            return direct.logits(input_ids, position_ids, kept)
        return self._logits(input_ids, position_ids, kept)

    @torch.inference_mode()
    def logits_and_hidden(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`logits`, and the last hidden states [num_tokens, hidden_width], after the model's last norm."""
        with watching_hidden(self.model) as found:
            logits = self._logits(input_ids, position_ids, kept)
        return logits, found[-1][0]

    def _logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            logits_to_keep=kept,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class ModelWeights:
    """The target modules of a loaded model by name (see BaseWeights)."""

    def __init__(self, model: nn.Module) -> None:
        self._linears = {
            name: (module, index)
            for module in model.modules()
            if isinstance(module, LoraLinear)
            for index, name in enumerate(module.target_names)
        }
        self._routers = {
            router.target.name: router
            for module in model.modules()
            if isinstance(router := getattr(module, "lora", None), LoraRouter)
        }
        self._experts = {
            target.name: module
            for module in model.modules()
            if isinstance(module, LoraExperts)
            for target in module.targets
        }
        self._embeddings = {
            module.targets[0].name: module for module in model.modules() if isinstance(module, LoraEmbedding)
        }

    def weight(self, target_name: str) -> torch.Tensor | Fp8Rows:
        """See BaseWeights."""
        if target_name in self._embeddings:
            return self._embeddings[target_name].weight.detach().T
        if target_name in self._routers:
            return self._routers[target_name].weight
        if (experts := self._experts.get(of_all(target_name))) is not None:
            return experts.target_weight(target_name)
        linear, index = self._linears[target_name]
        return linear.target_weight(index)

    def bias(self, target_name: str) -> torch.Tensor | None:
        """See BaseWeights."""
        if target_name in self._routers:
            return self._routers[target_name].bias
        if target_name in self._embeddings or of_all(target_name) in self._experts:
            return None  # of experts, no adapter names a bias
        linear, index = self._linears[target_name]
        return linear.target_bias(index)


def load_model(
    model_dir: Path,
    dtype: str,
    device: torch.device,
    *,
    max_step_tokens: int,
    max_model_len: int | None = None,
    max_adapter_model_len: int | None = None,
    kv_tokens: int | None = None,
    quantization: str = NOT_QUANTIZED,
    read_weights: ReadWeights | None = None,
) -> LoadedModel:
    """The checkpoint in `model_dir`, ready for its KV cache. Raises ConfigError, UnsupportedModel among them.

    `read_weights` makes the model from the folder, its configuration and the dtype, with attention PROBE_NAME; None:
    the folder's weights are read.

    dtype "auto" is the checkpoint's own. The model is checked for steps of up to max_step_tokens, and for the longest
    context that can be served: the least of its own limit, max_model_len and kv_tokens (the KV cache's tokens), or
    max_adapter_model_len if that is more. Only safetensors are read, and no code of the checkpoint is run.
    """
    config = _read_config(model_dir)
    limit = context_limit(config, max_model_len)
    length = min((n for n in (limit, max_model_len, kv_tokens) if n is not None), default=_UNNAMED_LENGTH)
    served_length = max(length, max_adapter_model_len or 0)
    torch_dtype = resolve_dtype(config, dtype)
    _check_quantized_once(config, quantization)
    check_dtype(quantization, torch_dtype, device)
    if device.type == "cpu" and torch_dtype == torch.bfloat16 and not (_has_bfloat16() or has_native()):
        _warn_of_emulation()
    if getattr(config.get_text_config(), "alibi", False):
        raise UnsupportedModel(f"model type {config.model_type}: ALiBi attention is not served")
    model = (read_weights or _read_weights)(model_dir, config, torch_dtype).to(device).eval()  # type: ignore[arg-type]  # HF's stubs
    model.config.pad_token_id = None  # else GPT-2 looks for padding in every pass: a wait, which no graph can record
    model.requires_grad_(False)
    if max_adapter_model_len is not None and rotary_of(model) is None:
        raise ConfigError("--max-adapter-model-len: this model has no rotary embedding that adapters could scale")
    replace_transposed(model)
    began_s = time.perf_counter()
    try:
        probe = probe_model(model, served_length, max_step_tokens)
    except ConfigError:
        raise
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory for a batch of up to {max_step_tokens} tokens beside the weights; lower --token-budget: {error}"
        ) from error
    except Exception as error:
        raise UnsupportedModel(
            f"model type {config.model_type}: its code fails on packed tokens, {_place_of(error, model)}: "
            f"{_first_line(error)}; it is not served"
        ) from error
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the KV cache may use the memory of the passes
    logger.info("model probed max_model_len=%d time_s=%.1f", served_length, time.perf_counter() - began_s)
    if limit is None and max_model_len is None:
        raise ConfigError(
            f"config.json of model type {config.model_type} names no longest context ({', '.join(LENGTH_KEYS)}); give "
            "--max-model-len"
        )
    context, num_linears = StepContext(), len(probe.linear_names)
    probe = fuse_model(model, probe, context, length)
    _replace_linears(model, probe, context, quantization)
    model.set_attn_implementation(ATTENTION_NAME)
    if device.type == "cpu":
        _leave_files(model)
    add_adapters(model, probe.router_names, probe.expert_names, context)
    _replace_head(model, probe, context)
    _replace_embedding(model, probe, context)
    rotary = replace_rotary(model, context)
    stacked = stack_layers(model, probe, context) if device.type == "cpu" else None
    logger.info(
        "model loaded type=%s dtype=%s device=%s layers=%d linears=%d",
        config.model_type,
        torch_dtype,
        device,
        len(probe.attention_layers),
        num_linears,
    )
    return LoadedModel(model, probe, context, limit or length, torch_dtype, stacked, rotary)


def resolve_dtype(config: PretrainedConfig, dtype: str) -> torch.dtype:
    """The dtype to serve in."""
    if dtype != "auto":
        return DTYPES[dtype]
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    if own not in DTYPES.values():
        raise ConfigError(f"config.json: dtype {own} is not served; set --dtype float32, bfloat16 or float16")
    assert isinstance(own, torch.dtype)
    return own


def _replace_linears(model: PreTrainedModel, probe: ModelProbe, context: StepContext, quantization: str) -> None:
    """Let adapters add to the linears that are transformers' own, and quantise all. Attention must be the probe's."""
    replace_linears(model, probe.linear_names, context)
    if quantization == FP8_WEIGHTS:
        quantize_linears(model, lambda: run_probe(model, torch.arange(NUM_TOKENS)))


def _replace_head(model: PreTrainedModel, probe: ModelProbe, context: StepContext) -> None:
    """Let adapters add to the head, and pack its weight unless the embedding reads it too."""
    if probe.head_name is None:
        return
    head = model.get_submodule(probe.head_name)
    assert isinstance(head, nn.Linear), f"{probe.head_name} is a {type(head).__name__}"
    replacement = LoraLinear([head], [probe.head_name], context, kind=TargetKind.HEAD)
    if head.weight is model.get_input_embeddings().weight:
        replacement.share_weight()
    else:
        replacement.pack_weight()
    replace_module(model, probe.head_name, replacement)


def _replace_embedding(model: PreTrainedModel, probe: ModelProbe, context: StepContext) -> None:
    if probe.embedding_name is None:
        return
    embedding = model.get_submodule(probe.embedding_name)
    assert isinstance(embedding, nn.Embedding), f"{probe.embedding_name} is a {type(embedding).__name__}"
    replace_module(model, probe.embedding_name, LoraEmbedding(embedding, probe.embedding_name, context))


def _leave_files(model: PreTrainedModel) -> None:
    """Copy what is left of the plain weights, so that no tensor keeps the checkpoint's files in memory."""
    for parameter in model.parameters():
        if not parameter.is_meta and not parameter.is_inference():  # a fused part's bias is a copy already
            parameter.data = parameter.data.clone()


def _warn_of_emulation() -> None:
    # torch's products on a CPU with AVX-512 only: 20 to 25 GFLOP/s of a core for 32 tokens, 63 to 77 in float32. Native
    # ones are as fast in both.
    logger.warning(
        "this CPU has no bfloat16 arithmetic, and without native code torch emulates it: a batch takes about three "
        "times as long as in float32; install a C compiler, or start control plane and worker with --dtype float32, "
        "which takes twice the memory"
    )


def _has_bfloat16() -> bool:
    """Whether the CPU computes in bfloat16. Assumed on every CPU that is not an x86."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return not is_x86 or bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _place_of(error: Exception, model: nn.Module) -> str:
    """Which module of the model raised the error."""
    names = {id(module): name for name, module in model.named_modules()}
    place, frame = "in the model", error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        if names.get(id(module)):
            place = f"in {names[id(module)]} ({type(module).__name__})"
        frame = frame.tb_next
    return place


def _first_line(error: Exception) -> str:
    """The error's first line, short enough for a log."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_MAX_ERROR_CHARS]


def _check_quantized_once(config: PretrainedConfig, quantization: str) -> None:
    if quantization != NOT_QUANTIZED and quantization_of(config) is not None:
        raise ConfigError(f"--quantization {quantization}: {TWICE_QUANTIZED}")


def _read_config(model_dir: Path) -> PretrainedConfig:
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"--model: {model_dir} holds no config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise UnsupportedModel(
            f"--model: transformers cannot read {model_dir / 'config.json'}: {_first_line(error)}"
        ) from error
    return config


def _read_weights(model_dir: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model on the CPU; refused if any weight is missing from the checkpoint."""
    register_probe(Recorder())
    how = quantization_of(config)
    model: Any
    info: Any
    try:
        arguments: dict[str, Any] = {
            "attn_implementation": PROBE_NAME,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,  # they are refused below, by name
        }
        if how is not None:
            model, info = read_dequantized(model_dir, config, how, dtype, **arguments)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]  # a pair, by output_loading_info
                model_dir,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                **arguments,
            )
    except ConfigError:
        raise
    except Exception as error:
        reason = f"cannot be loaded: {_first_line(error)}"
        if isinstance(error, KeyError) and error.args == (PROBE_NAME,):
            reason = "its code does not call transformers' attention interface, so that its attention cannot be paged"
        elif type(config) not in AutoModelForCausalLM._model_mapping:
            reason = "transformers has no causal language model of this type"
        raise UnsupportedModel(f"model type {config.model_type}: {reason}") from error
    if info.get("missing_keys"):
        raise ConfigError(
            f"--model: {model_dir}: missing keys: {', '.join(sorted(map(str, info['missing_keys']))[:5])}"
        )
    for name, in_checkpoint, by_config in sorted(info.get("mismatched_keys", ())):
        raise ConfigError(
            f"--model: {model_dir}: {name} has the shape {list(in_checkpoint)}, config.json makes it "
            f"{list(by_config)}; the two are of different models"
        )
    if info.get("unexpected_keys"):
        logger.warning("checkpoint holds weights the model lacks keys=%s", sorted(info["unexpected_keys"])[:5])
    assert isinstance(model, PreTrainedModel)
    return model
