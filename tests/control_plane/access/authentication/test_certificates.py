"""A certificate stands for the one name in it that the operator lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from control_plane.access.authentication.certificates import ClientIdentities, parse_identities
from control_plane.access.authentication.grants import InvalidAccessFile
from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.principal import Principal, Role
from control_plane.errors import Unauthenticated

ALICE = "spiffe://acme/alice"
LISTED = {
    ALICE: {"tenants": ["acme"], "roles": ["infer"], "adapters": ["acme.*"]},
    "ops.example": {"tenants": ["*"], "roles": ["admin"]},
}


GRANT = {"tenants": ["t"], "roles": ["infer"]}


@pytest.fixture
def method(tmp_path: Path) -> ClientIdentities:
    (tmp_path / "identities.json").write_text(json.dumps(LISTED))
    return ClientIdentities(tmp_path / "identities.json")


def test_a_listed_name_gives_its_principal(method: ClientIdentities) -> None:
    assert method.num_identities == 2
    alice = Principal(f"cert:{ALICE}", frozenset({Role.INFER}), ("acme",), ("acme.*",))
    assert method.principal(Presented(identities=("laptop.acme", ALICE))) == alice
    assert method.principal(Presented(identities=(ALICE, ALICE))) == alice
    admin = method.principal(Presented(identities=("ops.example",)))
    assert admin is not None and admin.is_admin and admin.may_act_for("any")


def test_without_a_certificate_it_is_not_of_this_method(method: ClientIdentities) -> None:
    assert method.principal(Presented()) is None


def test_names_are_listed_in_the_form_that_certificates_have() -> None:
    listed = parse_identities(json.dumps(dict.fromkeys(("Ops.Example", ALICE, "2001:DB8:0::7"), GRANT)).encode())
    assert list(listed) == ["ops.example", ALICE, "2001:db8::7"]
    assert listed["ops.example"].name == "cert:ops.example"


def test_names_that_are_not_listed_are_refused(method: ClientIdentities) -> None:
    for names in (("bob",), ("OPS.EXAMPLE",), ("ops.example.",), (f"{ALICE}/", "x")):
        with pytest.raises(Unauthenticated, match="none of the names"):
            method.principal(Presented(identities=names))


def test_a_certificate_of_two_listed_names_is_refused(method: ClientIdentities) -> None:
    with pytest.raises(Unauthenticated, match="2 names in the client's certificate are known"):
        method.principal(Presented(identities=(ALICE, "ops.example")))


@pytest.mark.parametrize("names", [(), ("bob",), (ALICE, "ops.example")], ids=["no name", "not listed", "two listed"])
def test_a_refusal_says_whose_certificate_it_was(method: ClientIdentities, names: tuple[str, ...]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        method.principal(Presented(identities=names, holder="cert:bob"))
    assert caught.value.refused_principal == Principal("cert:bob")


def test_a_token_that_nobody_knows_is_not_replaced_by_the_certificate(method: ClientIdentities) -> None:
    with pytest.raises(Unauthenticated, match="not one that this server knows"):
        Authenticator([method]).principal(Presented(token="sesame", identities=(ALICE,)))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "is a JSON list"),
        ({"": {}}, "'': is not a name of 1 to 255"),
        ({"a\nb": {}}, "is not a name of 1 to 255 printable"),
        ({"a@example.org": {}}, "'a@example.org': no certificate authenticates by such a name; use a URI with '://'"),
        ({"a": GRANT, "A": GRANT}, "'A': is listed twice; 'a' is the same name"),
        ({"a": []}, "'a': is a JSON list; use an object"),
        ({"a": {"tenants": ["t"]}}, "'a': field 'roles' is missing"),
        ({"a": {"tenants": ["t"], "roles": ["infer"], "expires": "x"}}, "'a': field 'expires' is unknown"),
        ({"a": {"tenants": ["T"], "roles": ["infer"]}}, "'a'.tenants: 'T' is not a tenant"),
        ({"a": {"tenants": ["t"], "roles": ["boss"]}}, "'a'.roles: 'boss' is not a role"),
    ],
)
def test_a_mistake_is_named(document: Any, message: str) -> None:
    with pytest.raises(InvalidAccessFile, match=message):
        parse_identities(json.dumps(document).encode())
