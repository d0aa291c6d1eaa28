"""A router's weight that adds the step's adapters to the product which chooses the experts.

transformers' routers multiply with a weight of their own and choose from the result in ways that differ by model. The
router stays as it is; its weight computes the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from data_plane.layers.context import StepContext
from data_plane.layers.packed_weight import NativeWeight, PackedWeight
from data_plane.plan import TargetKind, TargetModule
from kernels.linear import to_panels
from kernels.native import has_native

Operation = Callable[..., Any]


class WatchedWeight(nn.Parameter):
    """A parameter that has `on_use` compute every operation that it takes part in."""

    on_use: Callable[[Operation, tuple[Any, ...], Mapping[str, Any]], Any] | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See torch's documentation on extending torch."""
        with torch._C.DisableTorchFunctionSubclass():
            on_use = next((argument.on_use for argument in args if isinstance(argument, cls)), None)
            return func(*args, **(kwargs or {})) if on_use is None else on_use(func, args, kwargs or {})


class LoraRouter:
    """Adapters of one router. `attach` puts the weight in place."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, name: str, context: StepContext) -> None:
        num_experts, hidden = weight.shape
        self.target = TargetModule(name, TargetKind.ROUTER, hidden, num_experts)
        self.weight = weight
        self.bias = bias
        self._context = context
        self._packed: PackedWeight | None = None
        if has_native(weight):  # so that a row has the same bits in every batch
            self._packed = NativeWeight(to_panels(weight), num_experts, hidden)

    @classmethod
    def attach(cls, router: nn.Module, name: str, context: StepContext) -> LoraRouter:
        """Make the router's weight one that adds what adapters add. `router_problem` said that it can be done."""
        found: Any = router
        bias = getattr(found, "bias", None)
        lora = cls(found.weight.detach(), None if bias is None else bias.detach(), name, context)
        weight = WatchedWeight(lora.weight, requires_grad=False)
        found.weight = weight
        weight.on_use = lora._on_use  # after the assignment, which reads attributes
        found.lora = lora
        return lora

    def _on_use(self, func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The product for the router's input args[0], with what adapters add; any other operation as it is."""
        if func is not nn.functional.linear:
            return func(*args, **kwargs)
        target, x = self.target, args[0]
        output = func(*args, **kwargs) if self._packed is None else self._packed.linear(x, self.bias)
        lora = self._context.lora
        if lora is not None:
            lora.apply(target.name, x.reshape(-1, target.in_features), output.view(-1, target.out_features))
        return output


def router_problem(router: nn.Module) -> str:
    """Why a module with a weight [experts, hidden] takes no adapters; empty: it does.

    A run shows that its weight takes part in one product with the rows that the module receives, and in nothing else.
    """
    found: Any = router
    plain = found.weight
    uses: list[tuple[Any, tuple[Any, ...]]] = []
    watched = WatchedWeight(plain.detach(), requires_grad=False)

    def watch(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        uses.append((func, (*args, *kwargs.values())))
        return func(*args, **kwargs)

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, plain.shape[1], generator=generator).to(plain.device, plain.dtype)
    found.weight = watched
    watched.on_use = watch
    try:
        found(rows.clone())
    except Exception as error:
        return f"its class {type(router).__name__} cannot run alone: {type(error).__name__}"
    finally:
        watched.on_use = None
        found.weight = plain
    if len(uses) != 1 or uses[0][0] is not nn.functional.linear:
        return f"its class {type(router).__name__} uses its weight for more than one product of its input"
    x, _, *bias = uses[0][1]
    added = bias[0] if bias else None
    if added is not getattr(found, "bias", None) or not torch.equal(x.reshape(rows.shape), rows):
        return f"its class {type(router).__name__} multiplies its weight with something else than its input"
    return ""
