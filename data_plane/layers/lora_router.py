"""A router's weight that adds the step's adapters to the product which chooses the experts.

transformers' routers multiply with a weight of their own and choose from the result in ways that differ by model. The
router stays as it is; its weight adds to the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from data_plane.layers.context import StepContext
from data_plane.plan import TargetKind, TargetModule


class WatchedWeight(nn.Parameter):
    """A parameter that calls `on_use` for every operation that it takes part in."""

    on_use: Callable[[Any, tuple[Any, ...], Any], None] | None = None  # gets the operation, its arguments, its result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See torch's documentation on extending torch."""
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
            on_use = next((argument.on_use for argument in args if isinstance(argument, cls)), None)
            if on_use is not None:
                on_use(func, args, output)
        return output


class LoraRouter:
    """Adapters of one router. `attach` puts the weight in place."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, name: str, context: StepContext) -> None:
        num_experts, hidden = weight.shape
        self.target = TargetModule(name, TargetKind.ROUTER, hidden, num_experts)
        self.weight = weight
        self.bias = bias
        self._context = context

    @classmethod
    def attach(cls, router: nn.Module, name: str, context: StepContext) -> LoraRouter:
        """Make the router's weight one that adds what adapters add. `router_problem` said that it can be done."""
        found: Any = router
        bias = getattr(found, "bias", None)
        lora = cls(found.weight.detach(), None if bias is None else bias.detach(), name, context)
        weight = WatchedWeight(lora.weight, requires_grad=False)
        found.weight = weight
        weight.on_use = lora._on_use  # behind the assignment, which reads attributes
        found.lora = lora
        return lora

    def _on_use(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        lora = self._context.lora
        if lora is not None and func is nn.functional.linear:
            target = self.target
            lora.apply(target.name, args[0].reshape(-1, target.in_features), output.view(-1, target.out_features))


def router_problem(router: nn.Module) -> str:
    """Why a module with a weight [experts, hidden] takes no adapters; empty: it does.

    A run shows that its weight takes part in one product with the rows that the module receives, and in nothing else.
    """
    found: Any = router
    plain = found.weight
    uses: list[tuple[Any, tuple[Any, ...]]] = []
    watched = WatchedWeight(plain.detach(), requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, plain.shape[1], generator=generator).to(plain.device, plain.dtype)
    found.weight = watched
    watched.on_use = lambda func, args, _: uses.append((func, args))
    try:
        found(rows.clone())
    except Exception as error:
        return f"its class {type(router).__name__} cannot run alone: {type(error).__name__}"
    finally:
        watched.on_use = None
        found.weight = plain
    if len(uses) == 1 and uses[0][0] is nn.functional.linear and torch.equal(uses[0][1][0].reshape(rows.shape), rows):
        return ""
    return f"its class {type(router).__name__} uses its weight for more than one product of its input"
