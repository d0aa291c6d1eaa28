"""Shows whether a model computes with a token's index in the batch, by running it as if the batch began elsewhere.

A scale or a mask that a model makes by counting the batch's tokens depends on their indices instead of their positions.
With few tokens such a value may be the same for all, for example if it changes every thousand tokens. Moving the
indices by more than the longest context makes the difference visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_MARK = "motet_place"
_ATEN = torch.ops.aten
_INDEX_ARGUMENTS = {"index", "indices"}


class MovedPlaces(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """While entered: numbers n, n + 1, ... that count num_tokens tokens are moved by `shift` where they become values.

    Such numbers are recognised by their values; num_tokens is no other size of the model. Integers that index a tensor
    stay the same, so that gathering and scattering of tokens, for example of one expert's, works as before. A
    difference of two places is not a place.
    """

    def __init__(self, num_tokens: int, shift: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._num_tokens = num_tokens
        self._shift = shift

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        names = [argument.name for argument in func._schema.arguments]
        by_name = dict(zip(names, args, strict=False)) | kwargs
        for value in by_name.values():
            if _is_integer(value) and self._counts(value):  # made outside of torch's operators
                _mark(value)
        places = {name for name, value in by_name.items() if name not in _INDEX_ARGUMENTS and _has_place(value)}
        if not places:
            output = func(*args, **kwargs)
            return self._begun(func.overloadpacket, output)
        if func.overloadpacket in (_ATEN.sub, _ATEN.rsub) and {"self", "other"} <= places:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            # What is written to decides, before the write.
            if _is_integer(by_name[names[0]]):
                output = func(*args, **kwargs)
                _mark(output)
                return output
        else:
            output = func(*args, **kwargs)
            if not isinstance(output, torch.Tensor) or _is_integer(output):
                _mark(output)
                return output
        moved = {name: tree_map(self._moved, by_name[name]) for name in places}
        moved_args = tuple(moved.get(name, value) for name, value in zip(names, args, strict=False))
        return func(*moved_args, **{name: moved.get(name, value) for name, value in kwargs.items()})

    def _begun(self, operator: Any, output: Any) -> Any:
        """The result of an operator without places, which may itself make places."""
        is_count = operator is _ATEN.cumsum and _is_integer(output) and output.numel() == self._num_tokens
        if not is_count and not self._counts(output):
            return output
        if output.is_floating_point():
            return output + self._shift
        _mark(output)
        return output

    def _counts(self, value: Any) -> bool:
        """Whether the values count the tokens, and were not moved yet."""
        if not isinstance(value, torch.Tensor) or value.numel() != self._num_tokens or value.dtype is torch.bool:
            return False
        values = value.detach().flatten()
        return bool((values.diff() == 1).all()) and bool(values[0] < self._shift)

    def _moved(self, value: Any) -> Any:
        return value + self._shift if _has_place(value) else value


def _is_integer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool


def _mark(value: Any) -> None:
    if _is_integer(value):
        setattr(value, _MARK, True)


def _has_place(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_place(item) for item in value)
    return isinstance(value, torch.Tensor) and getattr(value, _MARK, False)
