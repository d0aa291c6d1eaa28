"""Builds the Caller of an RPC: the only place where credentials and the tenant are read from a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc.aio

from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.methods import is_open, require_allowed
from control_plane.access.principal import STRANGER, Principal
from control_plane.access.tenant_names import TENANT_FORM, is_tenant
from control_plane.caller import Caller
from control_plane.checks import quoted, refuse
from control_plane.errors import InvalidRequest, PermissionDenied, Unauthenticated, Unavailable
from control_plane.observers.trace_context import (
    TRACEPARENT_KEY,
    TRACESTATE_KEY,
    valid_traceparent,
    valid_tracestate,
)

TENANT_KEY = "motet-tenant"  # metadata
AUTHORIZATION_KEY = "authorization"  # metadata
_SCHEME = "bearer"
MAX_TOKEN_CHARS = 4096

Context = grpc.aio.ServicerContext[Any, Any]


class Callers:
    """Knows who makes a call, and refuses calls that their principal may not make."""

    def __init__(self, authenticator: Authenticator | None = None) -> None:
        self._authenticator = authenticator or Authenticator()

    def __call__(self, method: str, context: Context) -> Caller:
        """The caller of `method`, "/package.Service/Method".

        Raises Unauthenticated, PermissionDenied, InvalidRequest, or Unavailable while keys of tokens are fetched.
        """
        metadata = context.invocation_metadata() or ()
        caller = self._identified(method, metadata, context)
        for name, value in metadata:
            if name == TRACEPARENT_KEY and isinstance(value, str) and (traceparent := valid_traceparent(value)):
                states = [state for key, state in metadata if key == TRACESTATE_KEY and isinstance(state, str)]
                return replace(caller, traceparent=traceparent, tracestate=valid_tracestate(states))
        return caller

    def _identified(self, method: str, metadata: Any, context: Context) -> Caller:
        named = _single(metadata, TENANT_KEY)
        if named is not None and not is_tenant(named):
            raise refuse(TENANT_KEY, f"{quoted(named)} is not a valid tenant: {TENANT_FORM}")
        peer = context.peer()
        if not self._authenticator.is_on:  # the server knows no users, and believes the name
            return Caller(peer=peer) if named is None else Caller(tenant=named, peer=peer)
        if is_open(method):
            return self._without_rights(metadata, context)
        principal = self._authenticator.principal(_presented(metadata, context))
        try:
            require_allowed(method, principal)
            return _caller(named, principal, peer)
        except PermissionDenied as error:
            error.of(principal)
            raise

    def _without_rights(self, metadata: Any, context: Context) -> Caller:
        """The caller of a method that is open to everybody. A valid credential gives it a name, for limits, only."""
        try:
            principal = self._authenticator.principal(_presented(metadata, context))
        except (Unauthenticated, Unavailable, InvalidRequest):
            return Caller(tenant="", principal=STRANGER, peer=context.peer())
        known = replace(principal, roles=frozenset(), tenants=())
        return Caller(tenant=principal.default_tenant, principal=known, peer=context.peer())


def _caller(named: str | None, principal: Principal, peer: str) -> Caller:
    if named is not None and not principal.may_act_for(named):
        raise PermissionDenied(
            f"{TENANT_KEY}: this credential may not act for tenant {quoted(named)}; leave {TENANT_KEY} out, or use a "
            "credential of that tenant"
        )
    return Caller(tenant=principal.default_tenant if named is None else named, principal=principal, peer=peer)


def _presented(metadata: Any, context: Context) -> Presented:
    header = _single(metadata, AUTHORIZATION_KEY)
    auth = context.auth_context() or {}
    if list(auth.get("transport_security_type") or ()) != [b"ssl"]:  # only TLS verifies what the other fields say
        auth = {}
    token = "" if header is None else _token(header)
    if not auth.get("x509_pem_cert"):
        return Presented(token=token)
    # Not gRPC's own list of names: it ends a name at a NUL, and does not say of which type a name is. The package
    # cryptography is there where clients present certificates, and only there.
    from control_plane.access.peer_certificate import certificate_of

    certificate = certificate_of(auth)
    assert certificate is not None, "there is one"
    return Presented(token=token, identities=certificate.identities, holder=certificate.holder)


def _token(header: str) -> str:
    scheme, _, token = header.partition(" ")
    if scheme.lower() != _SCHEME or not token.strip():
        raise Unauthenticated(f"{AUTHORIZATION_KEY}: is not of the form 'Bearer TOKEN'; send it like that")
    if len(token) > MAX_TOKEN_CHARS:
        raise Unauthenticated(
            f"{AUTHORIZATION_KEY}: the token has {len(token)} characters; at most {MAX_TOKEN_CHARS} are read"
        )
    return token.strip()


def _single(metadata: Any, key: str) -> str | None:
    """The value of a key that may appear once. Raises InvalidRequest."""
    values = [value for name, value in metadata if name == key]
    if len(values) > 1:
        raise refuse(key, f"appears {len(values)} times in the metadata; send it once")
    if not values:
        return None
    return values[0].decode("ascii", "replace") if isinstance(values[0], bytes) else str(values[0])
