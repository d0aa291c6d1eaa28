"""Consecutive decoder layers as one native program: recorded once over fixed buffers, then one call per step.

The program reads the same memory as the layers' modules: weights in panels, KV caches, the arena's slot table. So it
follows every load and eviction of an adapter. It computes what the modules compute, in the same order and with the same
roundings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from data_plane.adapters.step.lora_step import MAX_PASSES
from data_plane.layers.attention import PagedAttention, attention_of
from data_plane.layers.context import StepContext
from data_plane.layers.decoder_layer import DecoderLayer
from data_plane.layers.gated_mlp import GatedMlp
from data_plane.layers.lora_linear import LoraLinear
from data_plane.layers.packed_weight import NativeWeight, SharedWeight
from data_plane.layers.rms_norm import RmsNorm
from data_plane.layers.rotary_attention import RotaryAttention
from kernels.gated_activation import native as gates
from kernels.linear import native as linears
from kernels.lora import Epilogue, ModuleGroup, native as lora
from kernels.native import DTYPES, Program, Step, has_native
from kernels.paged_attention import native as attentions
from kernels.paged_attention.options import Options
from kernels.rms_norm import native as norms
from kernels.rope import native as rotations


class AdapterTables(Protocol):
    """Where the weights of adapters on a linear are found (AdapterArena)."""

    def module_groups(self, names: tuple[str, ...]) -> list[tuple[ModuleGroup, Epilogue]]:
        """The modules in order, as groups that one op serves. The tensors of a group stay the same."""
        ...


class RecordedLayers:
    """The program of some layers and the norm after them."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        last_norm: RmsNorm,
        context: StepContext,
        tables: AdapterTables,
        *,
        max_tokens: int,
        rotary_half: int,
    ) -> None:
        """rotary_half: columns of the rotary tables. Raises CannotRecord."""
        self._max_tokens = max_tokens
        self._context = context
        self._tables = tables
        self._half = rotary_half
        # The second one is for steps in which tokens have several adapters: the same ops, and those of further passes.
        self._program, self._combining = Program(), Program()
        self._lora_modules = 1  # the most of one group
        first = layers[0].input_layernorm
        self._dtype = first.weight.dtype
        if not has_native(first.weight) or self._dtype not in DTYPES:
            raise CannotRecord(f"no native code for {self._dtype} on {first.weight.device}")
        hidden = len(first.weight)
        self._stream, self._normed, self._output = (self._rows(hidden) for _ in range(3))
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._norm(first, self._stream, residual=None)
        following = [layer.input_layernorm for layer in layers[1:]] + [last_norm]
        for layer, norm in zip(layers, following, strict=True):
            self._attention(layer.self_attn)
            self._norm(layer.post_attention_layernorm, self._output, residual=self._stream)
            self._mlp(layer.mlp)
            self._norm(norm, self._output, residual=self._stream)

    def can_run(self, num_tokens: int) -> bool:
        """Whether there is room for the tokens of a step."""
        return num_tokens <= self._max_tokens

    def run(self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The residual stream and its last norm, [T, hidden] each, valid until the next run.

        hidden_states is [T, hidden], cos and sin are [T, rotary_half] with dense rows. The context has the step.
        """
        num_tokens = len(hidden_states)
        stream = self._stream[:num_tokens]
        stream.copy_(hidden_states)
        context = self._context
        assert context.attention is not None, "no step was begun"
        attention = attentions.attention_step(context.attention.on_host(), self._block_size)
        turned = rotations.rotation(cos, sin, context.kv_positions)
        step = Step(num_tokens=num_tokens, rotation=turned.address, attention=ctypes.addressof(attention))
        program = self._program
        if context.lora is not None:
            tokens = context.lora.native_tokens(self._lora_modules)
            step.lora = ctypes.addressof(tokens)
            if not context.lora.is_plain:
                program = self._combining
        program.run(step)
        return stream, self._normed[:num_tokens]

    def _attention(self, module: nn.Module) -> None:
        if not isinstance(module, RotaryAttention):
            raise CannotRecord(f"{type(module).__name__} cannot be recorded as an attention")
        paged = attention_of(module)
        if not isinstance(paged, PagedAttention):
            raise CannotRecord("an attention has no cache")
        qkv = self._buffer("qkv", module.qkv.out_features)
        self._linear(module.qkv, self._normed, qkv)
        query, key, value = (
            part.view(len(part), count, -1)
            for part, count in zip(torch.split(qkv, module.widths, dim=1), module.heads, strict=True)
        )
        self._add("rotate_store", self._rotation(module, paged, query, key, value))
        attended = self._buffer("attended", query.shape[1] * value.shape[2])
        options = Options(
            module.settings.scale,
            module.settings.sliding_window,
            module.settings.softcap,
            module.settings.sinks,
            key_scale=paged.key_scale,
            value_scale=paged.value_scale,
        )
        caches = (paged.key_cache, paged.value_cache)
        if not attentions.can_serve(query, *caches, options):
            raise CannotRecord("an attention has heads, blocks or options that native code does not serve")
        problem = attentions.problem(query, *caches, options, attended.view(len(attended), query.shape[1], -1))
        self._block_size = paged.key_cache.shape[1]
        self._add("attention_decode", problem, is_open=True)
        self._add("attention_prefill", problem)
        self._linear(module.o_proj, attended, self._output)

    def _rotation(
        self,
        module: RotaryAttention,
        paged: PagedAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> ctypes.Structure:
        norm = module.head_norm
        if norm is None and module.q_norm is not None and module.k_norm is not None:
            # Query and key are normed whole, in place.
            for part, weights in ((query, module.q_norm), (key, module.k_norm)):
                rows = part.flatten(1)
                self._norm(weights, rows, residual=None, y=rows)
        return rotations.problem(
            query,
            key,
            self._half,
            value=value,
            key_cache=paged.key_cache,
            value_cache=paged.value_cache,
            key_scale=paged.key_scale,
            value_scale=paged.value_scale,
            norm=norm,
        )

    def _mlp(self, module: nn.Module) -> None:
        if not isinstance(module, GatedMlp):
            raise CannotRecord(f"{type(module).__name__} cannot be recorded as an MLP")
        both = self._buffer("both", module.gate_up.out_features)
        active = self._buffer("active", module.gate_up.out_features // 2)
        self._linear(module.gate_up, self._normed, both)
        self._add("gate", gates.problem(both, active, module.activation))
        self._linear(module.down_proj, active, self._output)

    def _linear(self, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        """y = module(x), with the step's adapters."""
        if isinstance(module, LoraLinear) and isinstance(module.packed, NativeWeight):
            op, weight = "linear", module.packed.panels
        elif isinstance(module, LoraLinear) and isinstance(module.packed, SharedWeight):
            op, weight = "plain_linear", module.packed.weight
        else:
            raise CannotRecord(f"{type(module).__name__} has no weight for native code")
        groups = self._tables.module_groups(module.target_names) if module.target_names else []
        passes, column = [], 0  # the problems of all passes, for each group
        for group, epilogue in groups:
            width = sum(group.out_features)
            part = y[:, column : column + width]
            passes.append([lora.problem(group, x, part, epilogue, lora_pass=number) for number in range(MAX_PASSES)])
            column += width
            self._lora_modules = max(self._lora_modules, group.num_modules)
        linear = linears.problem(x, weight, module.bias, y)
        if len(passes) == 1:
            self._shrink(passes[0], is_open=True)
            self._add(op, linear)
            self._expand(passes[0])
            return
        # The groups share the memory of h.
        self._add(op, linear)
        for problems in passes:
            self._shrink(problems, is_open=False)
            self._expand(problems)

    def _shrink(self, problems: Sequence[ctypes.Structure], *, is_open: bool) -> None:
        self._add("lora_shrink", problems[0], is_open=is_open)
        for problem in problems[1:]:
            self._combining.add("lora_shrink", problem, is_open=is_open)

    def _expand(self, problems: Sequence[ctypes.Structure]) -> None:
        self._combining.add("lora_sum", problems[0])
        self._add("lora_expand", problems[0])
        for problem in problems[1:]:
            self._combining.add("lora_expand", problem)

    def _add(self, op: str, problem: ctypes.Structure, *, is_open: bool = False) -> None:
        for program in (self._program, self._combining):
            program.add(op, problem, is_open=is_open)

    def _norm(
        self, module: RmsNorm, x: torch.Tensor, *, residual: torch.Tensor | None, y: torch.Tensor | None = None
    ) -> None:
        if module.weight.dtype != self._dtype:
            raise CannotRecord(f"a norm's weight is {module.weight.dtype}, the model's dtype {self._dtype}")
        y = self._normed if y is None else y
        problem = norms.problem(x, module.weight, module.eps, y, residual=residual, weight_offset=module.weight_offset)
        self._add("rms_norm", problem)

    def _buffer(self, name: str, width: int) -> torch.Tensor:
        """A buffer that all layers with this name and width share."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = self._rows(width)
        return self._buffers[name, width]

    def _rows(self, width: int) -> torch.Tensor:
        return torch.zeros(self._max_tokens, width, dtype=self._dtype)


class CannotRecord(Exception):
    """A native program cannot compute these layers: they run as modules."""
