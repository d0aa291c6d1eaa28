"""Which names each caller gets in pages, counts and suggestions, and how many names are looked at for that."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from control_plane.access.principal import ANYBODY, Principal, Role, of_roles
from control_plane.access.visibility import Ownership, Visibility, may_see
from control_plane.caller import Caller
from control_plane.registry import visible_names
from control_plane.registry.visible_names import VisibleNames

READER = of_roles({Role.ADAPTERS_READ})


def caller(tenant: str, adapters: tuple[str, ...] | None = None, *, is_admin: bool = False) -> Caller:
    roles = frozenset(Role) if is_admin else READER
    return Caller(tenant, Principal("key:x", roles, ("*",), adapters))


def walk(names: VisibleNames, who: Caller, count: int = 3) -> list[str]:
    """All names that the caller gets, part by part."""
    found: list[str] = []
    after = ""
    while True:
        part, go_on_after = names.part(who, after, count)
        assert len(part) <= count
        assert go_on_after == "" or go_on_after > after, "a walk that goes on comes to an end"
        found += part
        after = go_on_after
        if not after:
            return found


tenants = st.sampled_from(("acme", "labs", "other"))
ownerships = st.builds(
    Ownership, st.sampled_from(("", "acme", "labs")), st.sampled_from((Visibility.PRIVATE, Visibility.PUBLIC))
)
ownerships |= st.builds(
    lambda owner, shared: Ownership(owner, Visibility.SHARED, tuple(shared)),
    st.sampled_from(("", "acme", "labs")),
    st.sets(tenants, min_size=1),
)
adapter_ids = st.text("abx-.", min_size=1, max_size=4)
callers = st.builds(
    caller,
    tenants,
    st.none()
    | st.lists(st.sampled_from(("a*", "*", "*x", "ab", "b?", "[ab]-*", "@base", "x.a", "ab*x")), max_size=3).map(tuple),
    is_admin=st.booleans(),
)


@given(
    changes=st.lists(st.tuples(adapter_ids, st.none() | ownerships), max_size=40),
    who=callers,
    count=st.integers(1, 5),
    at_once=st.integers(1, 4),
)
@settings(max_examples=300)
def test_a_walk_gives_exactly_the_names_that_the_caller_may_see(
    changes: list[tuple[str, Ownership | None]], who: Caller, count: int, at_once: int
) -> None:
    """Whatever was registered, given to others and deleted before."""
    names, expected = VisibleNames(), dict[str, Ownership]()
    for name, ownership in changes:
        if name in expected:
            names.remove(name, expected.pop(name))
        if ownership is not None:
            names.add(name, ownership)
            expected[name] = ownership
    visible = [name for name, owned in sorted(expected.items()) if may_see(who.principal, who.tenant, owned, name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visible_names, "MAX_COMPARED", at_once)
        assert walk(names, who, count) == visible
        assert walk(VisibleNames(expected.items()), who, count) == visible
    assert len(names) == len(expected)
    if who.principal.adapters is None:
        assert names.num_visible_to(who) == len(visible)
    for name in ("a", "ab", "x-a", *expected):
        assert set(names.nearest(who, name)) <= set(visible)


MANY = 100_000


@pytest.fixture(scope="module")
def many() -> VisibleNames:
    """100 000 adapters of one tenant, a few of another one, and one public adapter."""
    owned = {f"acme-{number:06d}": Ownership("acme") for number in range(MANY)}
    owned |= {f"acme-{number:06d}-labs": Ownership("labs") for number in (7, 50_000, 99_999)}
    return VisibleNames([*owned.items(), ("welcome", Ownership("acme", Visibility.PUBLIC))])


def test_a_tenant_with_few_adapters_among_many_gets_them_at_once(many: VisibleNames) -> None:
    seen = ["acme-000007-labs", "acme-050000-labs", "acme-099999-labs", "welcome"]
    assert many.part(caller("labs"), "", 32) == (seen, "")
    assert many.part(caller("labs"), "", 4) == (seen, "")
    assert many.part(caller("labs"), "", 2) == (seen[:2], seen[1])
    assert many.part(caller("labs"), seen[1], 2) == (seen[2:], "")
    assert many.part(caller("other"), "", 32) == (["welcome"], "")
    assert [many.num_visible_to(caller(tenant)) for tenant in ("acme", "labs", "other")] == [MANY + 1, 4, 1]
    assert many.num_visible_to(Caller(principal=ANYBODY)) == MANY + 4


def test_suggestions_come_from_visible_names_only(many: VisibleNames) -> None:
    assert many.nearest(caller("labs"), "acme-050001-labs") == [
        "acme-050000-labs",
        "acme-000007-labs",
        "acme-099999-labs",
    ]
    assert "acme-050000" in many.nearest(caller("acme"), "acme-O50000")
    assert many.nearest(caller("other"), "acme-050001") == []
    assert many.nearest(caller("acme", ("welcome",)), "acme-050001") == []
    assert many.nearest(caller("acme", ("welcome",)), "welcom") == ["welcome"]


@pytest.mark.parametrize(
    ("adapters", "expected", "most"),
    [
        (("acme-05*",), 10_000, 1000),  # names that begin with it
        (("acme-000001", "welcome", "zzz", "acme-000002"), 3, 4),
        (("*-labs",), 0, 1000),  # any name may match: looked at in parts
        (("@base",), 0, 0),
    ],
)
def test_the_adapters_of_a_credential_are_compared_a_bounded_number_at_a_time(
    many: VisibleNames, monkeypatch: pytest.MonkeyPatch, adapters: tuple[str, ...], expected: int, most: int
) -> None:
    num_compared = longest = 0

    def counted(name: str, pattern: str) -> bool:
        nonlocal num_compared
        num_compared += name != "@base"
        return fnmatchcase(name, pattern)

    monkeypatch.setattr("control_plane.access.principal.fnmatchcase", counted)
    who, after, found = caller("acme", adapters), "", list[str]()
    while True:
        num_compared = 0
        part, after = many.part(who, after, 32)
        found += part
        longest = max(longest, num_compared)
        if not after:
            break
    assert len(found) == expected
    assert longest <= most * len(adapters)


def test_pages_of_a_tenant_touch_no_hidden_name(many: VisibleNames, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page costs is what it holds: no name is looked at one by one."""

    def looked(*_: Any) -> bool:
        raise AssertionError("a name was looked at")

    monkeypatch.setattr(Principal, "may_use", looked)
    assert len(walk(many, caller("labs"))) == 4
