"""Which adapter names each caller sees, in order: pages, counts and suggestions cost the same however many are hidden.

A name is in the index of all names, and in that of every tenant which sees it by name, or in the index of public ones.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from control_plane.access.visibility import Ownership
from control_plane.caller import Caller
from control_plane.registry.name_index import NameIndex, end_of, nearest

# Names of one part that are compared with the patterns of a credential, which takes about 1 us each.
MAX_COMPARED = 1000
_WILDCARD = re.compile(r"[*?\[]")


class VisibleNames:
    """The names of all adapters, by who sees them."""

    def __init__(self, owned: Iterable[tuple[str, Ownership]] = ()) -> None:
        names = dict(owned)
        by_tenant: defaultdict[str, list[str]] = defaultdict(list)
        for name, ownership in names.items():
            for tenant in () if ownership.is_public else ownership.tenants:
                by_tenant[tenant].append(name)
        # Invariant: a name is in `_all`, and either in `_public` or in `_by_tenant` of each tenant that sees it by
        # name. No index of a tenant is empty.
        self._all = NameIndex(names)
        self._public = NameIndex(name for name, ownership in names.items() if ownership.is_public)
        self._by_tenant = {tenant: NameIndex(seen) for tenant, seen in by_tenant.items()}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, name: str, ownership: Ownership) -> None:
        """Add a name; a known one of the same ownership changes nothing."""
        self._all.add(name)
        if ownership.is_public:
            self._public.add(name)
            return
        for tenant in ownership.tenants:
            self._by_tenant.setdefault(tenant, NameIndex()).add(name)

    def remove(self, name: str, ownership: Ownership) -> None:
        """Remove a name that was added with this ownership."""
        self._all.remove(name)
        if ownership.is_public:
            self._public.remove(name)
            return
        for tenant in ownership.tenants:
            index = self._by_tenant[tenant]
            index.remove(name)
            if not len(index):
                del self._by_tenant[tenant]

    def part(self, caller: Caller, after: str, count: int) -> tuple[list[str], str]:
        """Up to `count` names after `after` that the caller sees, and where to go on ("": it sees no further name).

        The place to go on may be a name that the caller does not see: it must never get there. A part may have fewer
        names than `count`, also none, before the last one.
        """
        indexes = self._indexes(caller)
        patterns = caller.principal.adapters
        if patterns is None:
            names = _merged(indexes, after, count + 1, "")
            return names[:count], names[count - 1] if len(names) > count else ""
        found: list[str] = []
        num_left = MAX_COMPARED
        for prefix in _beginnings(patterns):
            if end_of(prefix) <= after:
                continue
            for name in _merged(indexes, after, num_left, prefix):
                num_left -= 1
                if caller.principal.may_use(name):
                    found.append(name)
                if len(found) == count or not num_left:
                    return found, name
        return found, ""

    def nearest(self, caller: Caller, name: str) -> list[str]:
        """Names that look like `name`, best first, of those that the caller sees."""
        return nearest(self._indexes(caller), name, is_candidate=caller.principal.may_use)

    def num_visible_to(self, caller: Caller) -> int | None:
        """How many names the caller sees; None where its credential lists adapters: count those of all parts then."""
        if caller.principal.adapters is not None:
            return None
        return sum(map(len, self._indexes(caller)))

    def _indexes(self, caller: Caller) -> Sequence[NameIndex]:
        """Indexes without a common name, which hold what the caller's tenant sees."""
        if caller.principal.is_admin:
            return (self._all,)
        own = self._by_tenant.get(caller.tenant)
        return (self._public,) if own is None else (own, self._public)


def _merged(indexes: Sequence[NameIndex], after: str, count: int, prefix: str) -> list[str]:
    pages = [index.page(after, count, prefix=prefix) for index in indexes]
    return pages[0] if len(pages) == 1 else sorted(name for page in pages for name in page)[:count]


def _beginnings(patterns: Iterable[str]) -> list[str]:
    """What the names that match have at their beginning, in order; none begins with another one."""
    kept: list[str] = []
    for beginning in sorted(_WILDCARD.split(pattern, maxsplit=1)[0] for pattern in patterns):
        if not kept or not beginning.startswith(kept[-1]):
            kept.append(beginning)
    return kept
