"""Who may see an adapter and who may change it: the whole matrix, and the rules that hold for any caller."""

from __future__ import annotations

import itertools
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, strategies as st

from control_plane.access.principal import ANYBODY, BASE_MODEL, THE_SERVER, Principal, Role, of_roles
from control_plane.access.visibility import (
    Ownership,
    Visibility,
    may_change,
    may_give_to,
    may_see,
    owner_of_new,
)

SHARED = Visibility.SHARED
OWNERSHIPS = {
    "private": Ownership("acme"),
    "shared with labs": Ownership("acme", SHARED, ("labs",)),
    "public": Ownership("acme", Visibility.PUBLIC),
    "nobody's": Ownership(),
    "nobody's, shared with labs": Ownership("", SHARED, ("labs",)),
    "nobody's, public": Ownership("", Visibility.PUBLIC),
}
# Ownership -> for tenants acme, labs, other: "c" may change, "s" may see, "-" neither.
EXPECTED = {
    "private": "c--",
    "shared with labs": "cs-",
    "public": "css",
    "nobody's": "---",
    "nobody's, shared with labs": "-s-",
    "nobody's, public": "sss",
}
TENANTS = ("acme", "labs", "other")


def key(*roles: Role, tenants: tuple[str, ...] = TENANTS, adapters: tuple[str, ...] | None = None) -> Principal:
    return Principal("key:x", of_roles(roles), tenants, adapters)


WRITER, ADMIN = key(Role.ADAPTERS_WRITE), key(Role.ADMIN)


def rights(principal: Principal, tenant: str, ownership: Ownership, adapter_id: str = "poet") -> str:
    if may_change(principal, tenant, ownership, adapter_id):
        assert may_see(principal, tenant, ownership, adapter_id)
        return "c"
    return "s" if may_see(principal, tenant, ownership, adapter_id) else "-"


@pytest.mark.parametrize("name", OWNERSHIPS)
def test_each_tenant_has_the_rights_of_the_matrix(name: str) -> None:
    assert "".join(rights(WRITER, tenant, OWNERSHIPS[name]) for tenant in TENANTS) == EXPECTED[name]


@pytest.mark.parametrize("principal", [ADMIN, ANYBODY, THE_SERVER], ids=["admin", "no authentication", "server"])
@pytest.mark.parametrize(("tenant", "name"), list(itertools.product(TENANTS, OWNERSHIPS)))
def test_admins_and_everybody_without_authentication_may_change_all(
    principal: Principal, tenant: str, name: str
) -> None:
    assert rights(principal, tenant, OWNERSHIPS[name]) == "c"


@pytest.mark.parametrize("name", OWNERSHIPS)
@pytest.mark.parametrize("role", [Role.ADAPTERS_WRITE, Role.ADMIN])
def test_the_adapters_of_a_credential_restrict_seeing_and_changing(role: Role, name: str) -> None:
    for tenant in TENANTS:
        unrestricted = rights(key(role), tenant, OWNERSHIPS[name])
        assert rights(key(role, adapters=("po*",)), tenant, OWNERSHIPS[name]) == unrestricted
        assert rights(key(role, adapters=("prose", BASE_MODEL)), tenant, OWNERSHIPS[name]) == "-"
        assert rights(key(role, adapters=()), tenant, OWNERSHIPS[name]) == "-"


def test_only_admins_name_another_owner() -> None:
    assert may_give_to(WRITER, "acme", "acme") and not may_give_to(WRITER, "acme", "labs")
    assert not may_give_to(WRITER, "acme", "")
    assert all(may_give_to(principal, "acme", owner) for principal in (ADMIN, ANYBODY) for owner in ("", "labs"))


def test_new_adapters_belong_to_the_tenant_of_a_known_caller() -> None:
    assert owner_of_new(WRITER, "labs") == owner_of_new(ADMIN, "labs") == "labs"
    assert owner_of_new(ADMIN, "labs", "acme") == "acme"  # of a name that is reserved
    assert owner_of_new(ANYBODY, "labs", "acme") == owner_of_new(THE_SERVER, "labs", "acme") == ""
    assert owner_of_new(ANYBODY, "labs") == owner_of_new(THE_SERVER, "labs") == ""


tenants = st.sampled_from(("", *TENANTS, "default"))
ids = st.sampled_from(("poet", "prose", "acme-1"))
principals = st.builds(
    lambda roles, adapters: Principal("key:x", of_roles(roles), ("*",), adapters),
    st.sets(st.sampled_from(Role)),
    st.none() | st.lists(st.sampled_from(("poet", "p*", "acme-?", BASE_MODEL, "[a-p]*")), max_size=3).map(tuple),
)
ownerships = st.builds(Ownership, tenants) | st.builds(
    lambda owner, shared: Ownership(owner, SHARED if shared else Visibility.PUBLIC, tuple(sorted(shared))),
    tenants,
    st.sets(st.sampled_from(TENANTS)),
)


@given(principal=principals, tenant=st.sampled_from(TENANTS), ownership=ownerships, adapter_id=ids)
def test_the_rules_hold_for_any_caller_and_adapter(
    principal: Principal, tenant: str, ownership: Ownership, adapter_id: str
) -> None:
    """Written once more, from the sentences of the documentation."""
    is_listed = principal.adapters is None or any(fnmatchcase(adapter_id, item) for item in principal.adapters)
    is_admin = Role.ADMIN in principal.roles
    is_owner = tenant == ownership.owner
    is_reader = ownership.visibility is Visibility.PUBLIC or tenant in ownership.shared_with
    assert may_see(principal, tenant, ownership, adapter_id) == (is_listed and (is_admin or is_owner or is_reader))
    assert may_change(principal, tenant, ownership, adapter_id) == (is_listed and (is_admin or is_owner))


@given(principal=principals, ownership=ownerships, adapter_id=ids)
def test_no_tenant_at_all_owns_nothing(principal: Principal, ownership: Ownership, adapter_id: str) -> None:
    """An adapter without an owner is not that of a caller without a tenant."""
    is_admin = principal.is_admin and principal.may_use(adapter_id)
    assert may_change(principal, "", ownership, adapter_id) == is_admin
