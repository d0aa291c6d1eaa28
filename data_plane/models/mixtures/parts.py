"""Recognises the parts of a mixture of experts that hold weights of their own: routers, and the experts of a layer."""

from __future__ import annotations

from torch import nn

_ROUTER_DIMS, _STACKED_DIMS = 2, 3


def is_mixture_part(module: nn.Module) -> bool:
    """Whether a module may be a router, or the experts of a layer."""
    return not isinstance(module, nn.Linear | nn.Embedding) and (is_router(module) or is_stacked(module))


def is_router(module: nn.Module) -> bool:
    """Whether all that it holds is a weight [experts, hidden] and perhaps a bias."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.pop("weight", None)
    has_more = next(module.children(), None) is not None or (own.keys() - {"bias"})
    return weight is not None and weight.dim() == _ROUTER_DIMS and not has_more


def is_stacked(module: nn.Module) -> bool:
    return any(parameter.dim() == _STACKED_DIMS for parameter in module.parameters(recurse=False))
