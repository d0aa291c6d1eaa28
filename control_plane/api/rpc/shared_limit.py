"""A limit on things that callers hold, shared out between them as soon as it is reached.

The interceptor counts RPCs in such limits, the upload receiver open uploads. Below the limit everybody is let in. At
the limit, only callers that hold less than their equal part are let in, so that no caller can shut the others out.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from control_plane.errors import Exhausted

RETRY_AFTER_S = 1.0
RETRY_SPREAD = 1.5  # the longest wait that a client is given, in times of the shortest


@dataclass(slots=True)
class _Share:
    """What one holder has, and the holders inside it. Invariant: no child with num_held 0."""

    num_held: int = 0
    children: dict[str, _Share] = field(default_factory=dict)


class SharedLimit:
    """At most `limit` at once. Above the limit, holders that have less than their equal part still get a place.

    A holder is a path from the outside in, as Caller.holder makes it: tenant, principal and connection, or host and
    connection. Only those that hold anything count. The equal part of a tenant is the limit over the number of tenants.
    The part of a principal is its tenant's part over the number of this tenant's principals, and so on. So more keys or
    connections take nothing from other tenants. With k tenants of one principal and one connection each, at
    most limit x H are held, H = 1 + 1/2 + ... + 1/k; p principals and c connections of each multiply it by theirs.
    """

    def __init__(
        self, limit: int, what: str, *, retry_after_s: float = RETRY_AFTER_S, rng: random.Random | None = None
    ) -> None:
        """`what` names the things in messages, in the plural. Each refusal names a wait of its own, from
        `retry_after_s` up, so that callers who were refused together do not come back together.
        """
        assert limit > 0
        self._limit = limit
        self._what = what
        self._retry_after_s = retry_after_s
        self._rng = rng or random.Random(0)
        self._all = _Share()

    @property
    def num_held(self) -> int:
        """How many are held at present."""
        return self._all.num_held

    @property
    def num_holders(self) -> int:
        """How many tenants or hosts hold anything at present."""
        return len(self._all.children)

    @contextlib.contextmanager
    def place(self, holder: Sequence[str], amount: int = 1) -> Iterator[None]:
        """Hold so many while the block runs. Raises Exhausted if they are more than the holder's equal part leaves."""
        if not self.take(holder, amount):
            raise Exhausted(
                f"at most {self._limit} {self._what} at once, and you hold your equal part of them; try again",
                retry_after_s=self._retry_after_s * self._rng.uniform(1, RETRY_SPREAD),
            )
        try:
            yield
        finally:
            self.give_back(holder, amount)

    def take(self, holder: Sequence[str], amount: int = 1) -> bool:
        """Whether there was room for so many, which are held from now on."""
        if not self._has_room(holder, amount):
            return False
        share = self._all
        share.num_held += amount
        for key in holder:
            share = share.children.setdefault(key, _Share())
            share.num_held += amount
        return True

    def give_back(self, holder: Sequence[str], amount: int = 1) -> None:
        """Give back what was taken."""
        share = self._all
        share.num_held -= amount
        for key in holder:
            child = share.children[key]
            child.num_held -= amount
            if not child.num_held:
                del share.children[key]
            share = child

    def _has_room(self, holder: Sequence[str], amount: int) -> bool:
        if self.num_held + amount <= self._limit:
            return True
        part: float = self._limit
        share: _Share | None = self._all
        for key in holder:
            children = {} if share is None else share.children
            part /= len(children) + (key not in children)
            share = children.get(key)
            if (0 if share is None else share.num_held) + amount <= part:
                return True
        return False
