"""Makes objects of frozen dataclasses in a quarter of the time, for a start that makes hundreds of thousands.

The `__init__` of a frozen dataclass calls `object.__setattr__` for each field. Here a class of the same slots, which is
not frozen, takes the values, and the object is given its own class: Python lets classes of equal slots do that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


def quick(kind: type[_T]) -> Callable[..., _T]:
    """What makes objects of a frozen dataclass with slots, as the class itself does. It has no `__post_init__`."""
    assert not hasattr(kind, "__post_init__"), "nothing but the fields is set here"
    described: list[Any] = []
    for one in fields(kind):  # type: ignore[arg-type]  # mypy: not known to be a dataclass
        assert one.default_factory is MISSING, "one object for all is a default as well"
        described.append((one.name, Any) if one.default is MISSING else (one.name, Any, field(default=one.default)))
    twin = make_dataclass(kind.__name__, described, slots=True, eq=False, repr=False)

    def make(*values: Any, **named: Any) -> _T:
        made: Any = twin(*values, **named)
        made.__class__ = kind
        return made  # type: ignore[no-any-return]

    return make
