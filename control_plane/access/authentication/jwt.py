"""JSON Web Tokens: verifies a token of one issuer and turns its claims into a principal.

Only EdDSA, ES256 and RS256 are known, and each key serves one of them: a token cannot choose how it is verified.
Needs joserfc and cryptography; nothing imports this module before tokens are configured.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from joserfc import jwt
from joserfc.errors import BadSignatureError, ExpiredTokenError, InvalidClaimError, JoseError, MissingClaimError
from joserfc.jwk import Key
from joserfc.jws import JWSRegistry
from joserfc.util import urlsafe_b64decode

from control_plane.access.authentication.grants import MAX_TENANTS, ROLES, InvalidAccessFile, adapter_patterns
from control_plane.access.authentication.jwks import KeySource
from control_plane.access.authenticator import Presented
from control_plane.access.principal import ANY_TENANT, Principal, Role, of_roles
from control_plane.access.tenant_names import is_tenant
from control_plane.errors import Unauthenticated, Unavailable

ALGORITHMS = ("EdDSA", "ES256", "RS256")
LEEWAY_S = 60  # that the clocks of issuer and server may differ by
MAX_CHARS = 4096  # of a token
MAX_CACHED = 4096  # verified tokens
MAX_SUBJECT_CHARS = 255
_TYPES = (
    "jwt",
    "at+jwt",
    "application/jwt",
    "application/at+jwt",
)  # logout+jwt, dpop+jwt are not access tokens
_LATEST_S = 1e12  # an `exp` may be an integer, also a negative one, that no float can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """Which tokens count, and what their claims mean."""

    issuer: str  # claim `iss`, exactly
    audience: str  # claim `aud`, or one of its items, exactly
    tenant_claim: str = "tenant"  # a tenant, or a list of tenants
    roles_claim: str = "roles"  # a list, or a text with spaces between roles; roles of other systems are left out


class JsonWebTokens:
    """A method of authentication: bearer tokens of three parts with dots between them."""

    def __init__(
        self,
        rules: TokenRules,
        keys: KeySource,
        *,
        wall_clock: Callable[[], float] = time.time,
        max_cached: int = MAX_CACHED,
    ) -> None:
        self._rules = rules
        self._keys = keys
        self._wall_clock = wall_clock
        self._max_cached = max_cached
        options: dict[str, Any] = {
            "iss": {"essential": True, "value": rules.issuer},
            "aud": {"essential": True, "value": rules.audience},
            "exp": {"essential": True},
            "sub": {"essential": True},
        }
        self._claims = jwt.JWTClaimsRegistry(now=lambda: int(wall_clock()), leeway=LEEWAY_S, **options)
        self._registry = _Registry(strict_check_header=False)  # RFC 7515: unknown parameters that are not critical
        # Principals of verified tokens by SHA-256, the latest used last. Valid for `_cached_for` alone.
        self._cache: OrderedDict[bytes, Principal] = OrderedDict()
        self._cached_for: object = None

    def principal(self, presented: Presented) -> Principal | None:
        """The principal of the token; None for a token of another form.

        Raises Unauthenticated, or Unavailable while keys are being fetched that may verify the token.
        """
        token = presented.token
        if token.count(".") != 2:
            return None
        if len(token) > MAX_CHARS:
            raise Unauthenticated(f"the token has {len(token)} characters; at most {MAX_CHARS} are read")
        if self._cached_for is not self._keys.value:
            self._cache.clear()
            self._cached_for = self._keys.value
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        found = self._cache.pop(digest, None)
        # An expired one is verified again, which says that it is expired.
        if found is None or found.expires_s is None or found.expires_s <= self._wall_clock():
            found = self._principal_of(self._verified_claims(token))
        self._cache[digest] = found
        if len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return found

    def _verified_claims(self, token: str) -> dict[str, Any]:
        claims: dict[str, Any] = {}
        try:
            header = _header(token)
            key = self._key(header)
            claims = jwt.decode(token, key, registry=self._registry, decoder_cls=_StrictDecoder).claims
            self._claims.validate(claims)
        except ExpiredTokenError as error:
            raise self._expired(claims) from error
        except MissingClaimError as error:
            raise _refused(f"has no claim {error.claim}") from error
        except InvalidClaimError as error:
            raise _refused(f"has a claim {error.claim!r} that is not valid for this server at this time") from error
        except BadSignatureError as error:
            raise _refused("has a signature that is not that of its key") from error
        except (JoseError, ValueError, TypeError, RecursionError) as error:
            raise _refused("is not a valid JSON Web Token") from error
        return claims

    def _expired(self, claims: dict[str, Any]) -> Unauthenticated:
        """The refusal of a token that its issuer signed, with its holder if the claims name one."""
        expired = Unauthenticated("the token has expired; get a new one from its issuer")
        audience = claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        # The time may be checked before these: a token for another server names nobody here.
        if claims.get("iss") != self._rules.issuer or self._rules.audience not in audiences:
            return expired
        try:
            holder = self._principal_of({"sub": None, **claims})
        except Unauthenticated:
            return expired
        return expired.of(replace(holder, roles=frozenset()))

    def _key(self, header: dict[str, Any]) -> Key:
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in ALGORITHMS:
            raise _refused(f"is signed by an algorithm that this server does not use; it uses {', '.join(ALGORITHMS)}")
        # `b64` changes what is signed. Neither it nor any other extension that must be understood is known here.
        if "crit" in header or "b64" in header:
            raise _refused("has a header parameter 'crit' or 'b64', which this server does not use")
        if str(header.get("typ", "JWT")).lower() not in _TYPES:
            raise _refused("is not an access token by its header parameter 'typ'")
        if kid is not None and not isinstance(kid, str):
            raise _refused("has a header parameter 'kid' that is not a string")
        keys = self._keys.value
        key = keys.find(kid, algorithm) if keys is not None else None
        if key is not None:
            return key
        if self._keys.wants_other_keys():
            raise Unavailable("the key that signed the token is not known yet; keys are being fetched, try again")
        raise _refused("is signed by a key that this server does not know for its algorithm")

    def _principal_of(self, claims: dict[str, Any]) -> Principal:
        rules, subject = self._rules, claims["sub"]
        if not isinstance(subject, str) or not 0 < len(subject) <= MAX_SUBJECT_CHARS or not subject.isprintable():
            raise _refused(f"has a claim 'sub' that is not a text of 1 to {MAX_SUBJECT_CHARS} printable characters")
        roles = of_roles(_roles(claims.get(rules.roles_claim), rules.roles_claim))
        adapters = None
        if "adapters" in claims:
            try:
                adapters = adapter_patterns(claims["adapters"], "adapters")
            except InvalidAccessFile as error:
                raise _refused("has a claim 'adapters' that is not a list of adapters' ids and patterns") from error
        return Principal(
            f"jwt:{subject}",
            roles,
            _tenants(claims.get(rules.tenant_claim), rules.tenant_claim, is_admin=Role.ADMIN in roles),
            adapters,
            float(max(min(claims["exp"], _LATEST_S), -_LATEST_S)) + LEEWAY_S,
        )


class _Registry(JWSRegistry):
    """Joserfc's rules with our algorithms alone. Its own check warns of EdDSA, which RFC 9864 gave another name."""

    def get_alg(self, name: str) -> Any:
        assert name in ALGORITHMS, "checked before a key is chosen"
        return self.algorithms[name]


class _StrictDecoder(json.JSONDecoder):
    """Refuses objects in which a member appears twice: two readers could take different ones for true."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_without_twins)


def _header(token: str) -> dict[str, Any]:
    header = json.loads(urlsafe_b64decode(token.partition(".")[0].encode()), cls=_StrictDecoder)
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    return header


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a member appears twice")
    return members


def _roles(claim: object, name: str) -> list[Role]:
    items = claim.split() if isinstance(claim, str) else claim
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise _refused(f"has no claim {name!r} that lists roles")
    known = [ROLES[item] for item in items if item in ROLES]
    if not known:
        raise _refused(f"has none of the roles {', '.join(ROLES)} in its claim {name!r}")
    return known


def _tenants(claim: Any, name: str, *, is_admin: bool) -> tuple[str, ...]:
    """Tenants of the claim. All of them can be meant by an operator only: a customer might choose the name '*'."""
    items = [claim] if isinstance(claim, str) else claim
    is_valid = isinstance(items, list) and all(isinstance(item, str) for item in items)
    if not is_valid or not 0 < len(items) <= MAX_TENANTS:
        raise _refused(f"has no claim {name!r} that names a tenant, or at most {MAX_TENANTS}")
    if not all(is_tenant(item) or (is_admin and item == ANY_TENANT) for item in items):
        raise _refused(f"has a claim {name!r} that names tenants of another form than this server's")
    return tuple(dict.fromkeys(items))


def _refused(what: str) -> Unauthenticated:
    return Unauthenticated(f"the token {what}; get another one from its issuer, or ask the operator of the server")
