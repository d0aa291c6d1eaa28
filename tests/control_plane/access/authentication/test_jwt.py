"""The corpus of tokens: only those of the issuer, for this server, of this time, signed by its keys, are accepted."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from control_plane.access.authentication.jwks import SigningKeys, parse_jwks
from control_plane.access.authentication.jwt import MAX_CHARS, JsonWebTokens, TokenRules
from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.principal import Principal, Role
from control_plane.errors import Unauthenticated, Unavailable
from tests.control_plane.access.authentication.tokens import (
    AUDIENCE,
    CLAIMS,
    ISSUER,
    NOW_S,
    encoded,
    jwk,
    jwks,
    private_key,
    public_pem,
    raw_token,
    token,
)

ED, ES, RS = private_key("EdDSA"), private_key("ES256"), private_key("RS256")
KEYS = parse_jwks(jwks(jwk(ED, "ed"), jwk(ES, "es"), jwk(RS, "rs")))
OTHER = private_key("EdDSA", 1)


class Source:
    """Keys that the test sets."""

    def __init__(self, value: SigningKeys | None = KEYS) -> None:
        self.value = value
        self.is_fetching = False
        self.num_wanted = 0

    def wants_other_keys(self) -> bool:
        self.num_wanted += 1
        return self.is_fetching


def method(source: Source | None = None, *, now_s: float = NOW_S, **rules: str) -> JsonWebTokens:
    whole = {"issuer": ISSUER, "audience": AUDIENCE, **rules}
    return JsonWebTokens(TokenRules(**whole), source or Source(), wall_clock=lambda: now_s)


def principal(text: str, **more: Any) -> Principal:
    found = method(**more).principal(Presented(token=text))
    assert found is not None
    return found


def refusal(text: str, **more: Any) -> str:
    with pytest.raises(Unauthenticated) as caught:
        method(**more).principal(Presented(token=text))
    message = str(caught.value)
    assert all(part not in message for part in text.split(".") if len(part) > 3)
    return message


@pytest.mark.parametrize(("key", "algorithm", "kid"), [(ED, "EdDSA", "ed"), (ES, "ES256", "es"), (RS, "RS256", "rs")])
def test_each_algorithm_is_accepted_with_and_without_the_name_of_its_key(key: Any, algorithm: str, kid: str) -> None:
    expected = Principal("jwt:alice", frozenset({Role.INFER}), ("acme",), None, NOW_S + 660)
    assert principal(token(key, algorithm, header={"kid": kid})) == expected
    assert principal(token(key, algorithm)) == expected


def test_claims_become_tenants_roles_and_adapters() -> None:
    whole = principal(
        token(ED, tenant=["acme", "labs", "acme"], roles="openid adapters.write  infer", adapters=["acme.*", "@base"])
    )
    assert whole.tenants == ("acme", "labs") and whole.adapters == ("acme.*", "@base")
    assert whole.roles == {Role.INFER, Role.ADAPTERS_READ, Role.ADAPTERS_WRITE}
    named = principal(
        token(ED, without=("tenant", "roles"), org="labs", scope="infer"), tenant_claim="org", roles_claim="scope"
    )
    assert named.tenants == ("labs",) and named.roles == {Role.INFER}
    assert principal(token(ED, aud=["other", AUDIENCE])).name == "jwt:alice"
    assert principal(token(ED, adapters=[])).adapters == ()


def test_all_tenants_can_be_meant_by_an_operator_only() -> None:
    assert principal(token(ED, tenant="*", roles=["admin"])).may_act_for("any")
    assert "tenants of another form" in refusal(token(ED, tenant="*"))
    assert "tenants of another form" in refusal(token(ED, tenant=["acme", "*"], roles="adapters.write"))


def test_clocks_may_differ_by_a_minute() -> None:
    text = token(ED, nbf=NOW_S, iat=NOW_S)
    for now_s in (NOW_S - 60, NOW_S + 659):
        assert principal(text, now_s=now_s).name == "jwt:alice"
    assert "claim 'nbf'" in refusal(token(ED, nbf=NOW_S), now_s=NOW_S - 61)
    assert "claim 'iat'" in refusal(token(ED, iat=NOW_S), now_s=NOW_S - 61)
    assert "has expired" in refusal(text, now_s=NOW_S + 660)


def test_the_refusal_of_an_expired_token_names_its_holder_and_gives_no_rights() -> None:
    """The audit log says who still uses an old token. A token that the issuer did not sign names nobody."""
    late_s = NOW_S + 660
    with pytest.raises(Unauthenticated) as caught:
        method(now_s=late_s).principal(Presented(token=token(ED)))
    assert caught.value.refused_principal == Principal("jwt:alice", frozenset(), ("acme",), None, NOW_S + 660)
    for text in (token(OTHER), token(ED, aud="other"), token(ED, sub="a\nb"), token(ED, tenant=7)):
        with pytest.raises(Unauthenticated) as caught:
            method(now_s=late_s).principal(Presented(token=text))
        assert caught.value.refused_principal is None


def es_in_der() -> str:
    """An ES256 token whose signature has the form of certificates, not that of tokens."""
    head, claims, _ = token(ES, "ES256").split(".")
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return f"{head}.{claims}.{encoded(ES.sign(f'{head}.{claims}'.encode(), ec.ECDSA(hashes.SHA256())))}"


def with_claims(text: str) -> str:
    return raw_token('{"alg": "EdDSA"}', text, ED, "EdDSA")


WHOLE = json.dumps(CLAIMS)
CORPUS: dict[str, tuple[str, str]] = {
    "alg none, no signature": (token(None, "none"), "algorithm that this server does not use"),
    "alg None in other letters": (token(None, "none", header={"alg": "nOnE"}), "algorithm that this server"),
    "alg none with the signature of a key": (token(ED, header={"alg": "none"}), "algorithm that this server"),
    "HS256 with the public key as the secret": (token(public_pem(RS), "HS256"), "algorithm that this server"),
    "HS256 that says RS256": (token(public_pem(RS), "HS256", header={"alg": "RS256"}), "signature"),
    "HS256 with the raw public key": (token(ED.public_key().public_bytes_raw(), "HS256"), "algorithm"),
    "RS512": (token(RS, "RS256", header={"alg": "RS512"}), "algorithm that this server"),
    "PS256": (token(RS, "RS256", header={"alg": "PS256"}), "algorithm that this server"),
    "no alg": (raw_token("{}", WHOLE, ED, "EdDSA"), "algorithm that this server"),
    "alg is a list": (token(ED, header={"alg": ["EdDSA"]}), "algorithm that this server"),
    "alg twice": (raw_token('{"alg":"none","alg":"EdDSA"}', WHOLE, ED, "EdDSA"), "not a valid"),
    "another key": (token(OTHER), "signature"),
    "another key under a known name": (token(OTHER, header={"kid": "ed"}), "signature"),
    "its own key in the header": (token(OTHER, header={"jwk": jwk(OTHER)}), "signature"),
    "a URL of keys in the header": (token(OTHER, header={"jku": "https://evil.example/jwks"}), "signature"),
    "unknown kid": (token(ED, header={"kid": "new"}), "key that this server does not know"),
    "kid of another algorithm": (token(ED, header={"kid": "rs"}), "key that this server does not know"),
    "alg of another key": (token(ED, "EdDSA", header={"alg": "RS256", "kid": "ed"}), "does not know"),
    "alg and kid of another key": (token(ED, "EdDSA", header={"alg": "RS256", "kid": "rs"}), "signature"),
    "kid is a number": (token(ED, header={"kid": 1}), "'kid' that is not a string"),
    "kid is a path": (token(ED, header={"kid": "../../dev/null"}), "does not know"),
    "crit with an unknown extension": (token(ED, header={"crit": ["x"], "x": 1}), "'crit' or 'b64'"),
    "crit with b64": (token(ED, header={"crit": ["b64"], "b64": False}), "'crit' or 'b64'"),
    "b64 alone": (token(ED, header={"b64": False}), "'crit' or 'b64'"),
    "empty crit": (token(ED, header={"crit": []}), "'crit' or 'b64'"),
    "a logout token": (token(ED, header={"typ": "logout+jwt"}), "not an access token"),
    "expired": (token(ED, exp=NOW_S - 60), "has expired"),
    "not yet valid": (token(ED, nbf=NOW_S + 61), "claim 'nbf'"),
    "issued in the future": (token(ED, iat=NOW_S + 61), "claim 'iat'"),
    "no exp": (token(ED, without=("exp",)), "has no claim exp"),
    "exp is null": (token(ED, exp=None), "has no claim exp"),
    "exp is a text": (token(ED, exp=str(NOW_S + 600)), "claim 'exp'"),
    "exp is true": (token(ED, exp=True), "claim 'exp'"),
    "exp is not a number": (with_claims(WHOLE.replace(str(NOW_S + 600), "NaN")), "claim 'exp'"),
    "exp is infinite": (with_claims(WHOLE.replace(str(NOW_S + 600), "Infinity")), "claim 'exp'"),
    "another audience": (token(ED, aud="other"), "claim 'aud'"),
    "audience with a prefix": (token(ED, aud=f"{AUDIENCE}2"), "claim 'aud'"),
    "no audience": (token(ED, without=("aud",)), "has no claim aud"),
    "empty list of audiences": (token(ED, aud=[]), "claim 'aud'"),
    "another issuer": (token(ED, iss="https://id.example/"), "claim 'iss'"),
    "a list of issuers": (token(ED, iss=[ISSUER]), "claim 'iss'"),
    "no issuer": (token(ED, without=("iss",)), "has no claim iss"),
    "no subject": (token(ED, without=("sub",)), "has no claim sub"),
    "empty subject": (token(ED, sub=""), "claim 'sub'"),
    "subject of two lines": (token(ED, sub="a\nb"), "claim 'sub'"),
    "subject is a number": (token(ED, sub=5), "claim 'sub'"),
    "no tenant": (token(ED, without=("tenant",)), "no claim 'tenant'"),
    "no tenant in the list": (token(ED, tenant=[]), "no claim 'tenant'"),
    "tenant of another form": (token(ED, tenant="ACME"), "tenants of another form"),
    "tenant is an object": (token(ED, tenant={"id": "acme"}), "no claim 'tenant'"),
    "no roles": (token(ED, without=("roles",)), "no claim 'roles'"),
    "unknown roles": (token(ED, roles=["openid", "INFER"]), "none of the roles"),
    "roles are an object": (token(ED, roles={"infer": True}), "no claim 'roles'"),
    "adapters are a text": (token(ED, adapters="*"), "claim 'adapters'"),
    "adapters are null": (token(ED, adapters=None), "claim 'adapters'"),
    "exp twice": (with_claims(WHOLE[:-1] + f', "exp": {NOW_S + 900}}}'), "not a valid"),
    "roles twice": (with_claims(WHOLE[:-1] + ', "roles": ["admin"]}'), "not a valid"),
    "oversized": (token(ED, note="x" * MAX_CHARS), "at most 4096 are read"),
    "claims are a list": (with_claims("[1]"), "not a valid"),
    "claims are nested deeply": (with_claims('{"a":' + "[" * 2500), "not a valid"),
    "header is nested deeply": (raw_token("[" * 2500, "{}", ED, "EdDSA"), "not a valid"),
    "header is a number": (raw_token("7", WHOLE, ED, "EdDSA"), "not a valid"),
    "exp of 3000 digits": (with_claims('{"exp": ' + "9" * 2900 + "}"), "has no claim"),
    "signature in another form": (es_in_der(), "signature"),
    "no signature": (token(ED).rpartition(".")[0] + ".", "signature"),
    "signature with padding": (token(ED) + "=", "signature"),
    "dots alone": ("..", "not a valid"),
    "junk": ("a.b.c", "not a valid"),
    "letters outside of base64": ("é.é.é", "not a valid"),
    "surrogates": ("\udcff.\udcff.\udcff", "not a valid"),
}


@pytest.mark.parametrize("name", CORPUS)
def test_bad_tokens_are_refused_and_not_repeated(name: str) -> None:
    text, message = CORPUS[name]
    assert message in refusal(text)


@pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "Infinity", "1e400", '"NaN"', "[]", "{}", "true", '"1"'])
def test_a_time_that_is_not_a_finite_number_is_refused(claim: str, value: str) -> None:
    """Python's JSON reads NaN, which is neither before nor after any time."""
    others = {name: time_s for name, time_s in CLAIMS.items() if name != claim}
    text = json.dumps(others)[:-1] + f', "{claim}": {value}}}'
    assert f"claim {claim!r}" in refusal(with_claims(text))


@pytest.mark.parametrize("value", ["0", "-1", "-1e308", "-0.0", "-" + "9" * 400])
def test_a_time_before_all_others_is_long_ago(value: str) -> None:
    assert "has expired" in refusal(with_claims(WHOLE.replace(str(NOW_S + 600), value)))
    assert principal(with_claims(WHOLE[:-1] + f', "nbf": {value}}}')).name == "jwt:alice"


def test_a_very_late_exp_is_a_late_exp() -> None:
    late = principal(with_claims(WHOLE.replace(str(NOW_S + 600), "9" * 400)))
    assert late.expires_s is not None and late.expires_s > 1e12


def test_tokens_of_another_form_are_left_to_other_methods() -> None:
    for text in ("", "motet_k_s", "a.b", "a.b.c.d.e"):
        assert method().principal(Presented(token=text)) is None


def test_a_token_without_kid_needs_a_key_that_is_alone() -> None:
    two = Source(parse_jwks(jwks(jwk(ED, "a"), jwk(OTHER, "b"))))
    assert "does not know" in refusal(token(ED), source=two)
    assert principal(token(ED, header={"kid": "a"}), source=two).name == "jwt:alice"


def test_an_unknown_key_is_fetched_and_the_caller_may_try_again() -> None:
    source = Source(None)
    tokens = method(source)
    with pytest.raises(Unauthenticated, match="does not know"):
        tokens.principal(Presented(token=token(ED)))
    source.is_fetching = True
    with pytest.raises(Unavailable, match="keys are being fetched"):
        tokens.principal(Presented(token=token(ED)))
    source.value = KEYS
    assert tokens.principal(Presented(token=token(ED))) is not None and source.num_wanted == 2


class Counted(dict[tuple[str | None, str], Any]):
    """Notes the names that tokens are verified by: each of a token that is not cached."""

    def __init__(self, keys: SigningKeys) -> None:
        super().__init__(keys.by_name)
        self.used: list[str | None] = []

    def get(self, name: tuple[str | None, str], default: Any = None) -> Any:
        self.used.append(name[0])
        return super().get(name, default)


def test_a_verified_token_is_not_verified_again_until_the_keys_change() -> None:
    known, source = Counted(KEYS), Source()
    source.value = SigningKeys(known)
    tokens = method(source)
    presented = Presented(token=token(ED, header={"kid": "ed"}))
    first = tokens.principal(presented)
    assert tokens.principal(presented) is first and known.used == ["ed"]
    source.value = parse_jwks(jwks(jwk(RS, "rs")))
    with pytest.raises(Unauthenticated, match="does not know"):
        tokens.principal(presented)
    source.value = SigningKeys(known)
    assert tokens.principal(presented) == first and known.used == ["ed", "ed"]


def test_a_cached_token_ends_at_its_time() -> None:
    now_s = [float(NOW_S)]
    tokens = JsonWebTokens(TokenRules(issuer=ISSUER, audience=AUDIENCE), Source(), wall_clock=lambda: now_s[0])
    authenticator = Authenticator([tokens], wall_clock=lambda: now_s[0])
    presented = Presented(token=token(ED))
    assert authenticator.principal(presented).name == "jwt:alice"
    now_s[0] += 659
    assert authenticator.principal(presented).name == "jwt:alice"
    now_s[0] += 1
    with pytest.raises(Unauthenticated, match="the token has expired"):
        authenticator.principal(presented)


def test_the_cache_keeps_the_latest_used_and_no_failures() -> None:
    known = Counted(parse_jwks(jwks(*(jwk(ED, name) for name in "abcx"))))
    rules = TokenRules(issuer=ISSUER, audience=AUDIENCE)
    tokens = JsonWebTokens(rules, Source(SigningKeys(known)), wall_clock=lambda: NOW_S, max_cached=2)
    a, b, c = (Presented(token=token(ED, header={"kid": name})) for name in "abc")
    for presented in (a, b, a, c, a, b):  # c replaces b, which was used before a
        tokens.principal(presented)
    assert known.used == ["a", "b", "c", "b"]
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            tokens.principal(Presented(token=token(OTHER, header={"kid": "x"})))
    assert tokens.principal(a) and tokens.principal(b)
    assert known.used == ["a", "b", "c", "b", "x", "x", "x"]


@given(st.data())
def test_whatever_is_changed_in_a_token_makes_it_invalid(data: st.DataObject) -> None:
    """And nothing else than a refusal comes of it."""
    algorithm, key = data.draw(st.sampled_from([("EdDSA", ED), ("ES256", ES), ("RS256", RS)]))
    text = token(key, algorithm)
    place = data.draw(st.integers(0, len(text) - 1))
    piece = data.draw(st.text(st.characters(codec=None, categories=None), max_size=3))
    changed = text[:place] + piece + text[place + data.draw(st.integers(0, 3)) :]
    if changed == text:
        return
    tokens = method()
    with contextlib.suppress(Unauthenticated):
        assert tokens.principal(Presented(token=changed)) is None
