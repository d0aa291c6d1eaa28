"""The methods are tried in order; without any, everybody is anybody."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.principal import ANY_TENANT, ANYBODY, Principal, Role
from control_plane.errors import Unauthenticated

ALICE = Principal("key:alice", frozenset({Role.INFER}), ("acme", "labs"), ("acme.*",), expires_s=100.0)


@dataclass
class ByWord:
    """A method that knows tokens of one form."""

    word: str
    known: Principal

    def principal(self, presented: Presented) -> Principal | None:
        if not presented.token.startswith(self.word):
            return None
        if presented.token != self.word:
            raise Unauthenticated("not valid")
        return self.known


def authenticator(now_s: float = 0.0) -> Authenticator:
    return Authenticator([ByWord("other", ANYBODY), ByWord("alice", ALICE)], wall_clock=lambda: now_s)


def test_without_methods_everybody_is_anybody() -> None:
    assert Authenticator().principal(Presented(token="whatever")) is ANYBODY
    assert not Authenticator().is_on and authenticator().is_on


def test_the_first_method_that_knows_what_is_presented_decides() -> None:
    assert authenticator().principal(Presented(token="alice")) is ALICE
    with pytest.raises(Unauthenticated, match="not valid"):
        authenticator().principal(Presented(token="alice2"))


def test_what_no_method_knows_is_refused_without_repeating_it() -> None:
    with pytest.raises(Unauthenticated, match="needs a credential"):
        authenticator().principal(Presented())
    with pytest.raises(Unauthenticated, match="not one that this server knows") as caught:
        authenticator().principal(Presented(token="sesame"))
    assert "sesame" not in str(caught.value) and "sesame" not in repr(Presented(token="sesame"))


def test_a_credential_ends_at_its_time() -> None:
    assert authenticator(99.9).principal(Presented(token="alice")) is ALICE
    with pytest.raises(Unauthenticated, match="expired") as caught:
        authenticator(100.0).principal(Presented(token="alice"))
    refused = caught.value.refused_principal
    assert isinstance(refused, Principal) and (refused.name, refused.default_tenant) == ("key:alice", "acme")
    assert not refused.roles, "it is a name for the audit log"


@pytest.mark.parametrize("pattern", ["[!x]*", "?base", "@*", "**", "*base", "@bas[e]"])
def test_only_its_own_name_and_a_star_mean_the_base_model(pattern: str) -> None:
    assert not Principal("key:x", adapters=(pattern,)).may_use("")
    for allowed in ("*", "@base"):
        assert Principal("key:x", adapters=(pattern, allowed)).may_use("")


def test_a_principal_acts_for_its_tenants_and_uses_its_adapters() -> None:
    assert ALICE.default_tenant == "acme" and ALICE.may_act_for("labs") and not ALICE.may_act_for("other")
    assert ALICE.may_use("acme.poet") and not ALICE.may_use("poet") and not ALICE.may_use("")
    everyone = Principal("key:x", tenants=(ANY_TENANT,), adapters=("@base",))
    assert everyone.default_tenant == "default" and everyone.may_act_for("any") and everyone.may_use("")
    assert ANYBODY.may_use("") and ANYBODY.may_use("x") and not ANYBODY.is_authenticated
