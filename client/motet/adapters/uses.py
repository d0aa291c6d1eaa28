"""Adapters that one request combines, or one with a scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from motet.types import AdapterUse
from motet.v1 import generation_pb2

Combination: TypeAlias = Literal["cat", "linear"]


# Names with their scales, or adapters one by one; a name alone has scale 1.
AdapterUses: TypeAlias = Mapping[str, float] | Sequence[str | AdapterUse]


def uses_to(adapters: AdapterUses | None) -> Iterable[generation_pb2.AdapterUse]:
    """The adapters as the wire carries them. Raises TypeError for values of other types."""
    if adapters is None:
        return
    if isinstance(adapters, str) or not isinstance(adapters, Iterable):
        raise TypeError(f"adapters is {adapters!r:.100}; give a list of names, or names with scales")
    pairs = adapters.items() if isinstance(adapters, Mapping) else ((use, None) for use in adapters)
    for named, scale in pairs:
        use = named if isinstance(named, AdapterUse) else AdapterUse(named, 1.0 if scale is None else scale)
        if not isinstance(use.name, str) or isinstance(use.scale, bool) or not isinstance(use.scale, int | float):
            raise TypeError(f"adapters has {use!r}; give names as text and scales as numbers")
        yield generation_pb2.AdapterUse(name=use.name, digest=use.digest, scale=use.scale)


def combination_to(combination: Combination | None) -> generation_pb2.Combination:
    """The combination as the wire carries it. Raises ValueError."""
    if combination is None:
        return generation_pb2.COMBINATION_UNSPECIFIED
    known = {"cat": generation_pb2.COMBINATION_CAT, "linear": generation_pb2.COMBINATION_LINEAR}
    if not isinstance(combination, str) or combination not in known:
        raise ValueError(f'combination is {combination!r:.100}; give "cat" or "linear"')
    return known[combination]


def uses_from(message: generation_pb2.GenerationStarted) -> tuple[AdapterUse, ...]:
    """The adapters that the server reports."""
    return tuple(AdapterUse(use.name, use.scale, use.digest) for use in message.adapters)
