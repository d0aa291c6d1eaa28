"""Finds out which principal makes a call, by whatever the client presents: a bearer token or a certificate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from control_plane.access.principal import ANYBODY, Principal
from control_plane.errors import Unauthenticated

_HOW = "send an API key or a token as metadata 'authorization: Bearer ...'"


@dataclass(frozen=True, slots=True)
class Presented:
    """What a client presents to prove who it is."""

    token: str = ""  # after "Bearer " in the metadata `authorization`; a secret: never log it
    identities: tuple[str, ...] = ()  # of the client's certificate, which TLS has verified
    holder: str = ""  # of that certificate, as a principal's name

    def __repr__(self) -> str:
        return f"Presented(token={'***' if self.token else ''}, identities={self.identities})"


class Method(Protocol):
    """One way to prove who one is."""

    def principal(self, presented: Presented) -> Principal | None:
        """The principal; None if what is presented is not of this method.

        Raises Unauthenticated, with a message that repeats no secret, if it is of this method and not valid.
        """


class Authenticator:
    """Tries the methods that the operator has set up, in order. Without any, everybody is ANYBODY."""

    def __init__(self, methods: Sequence[Method] = (), *, wall_clock: Callable[[], float] = time.time) -> None:
        self._methods = tuple(methods)
        self._wall_clock = wall_clock

    @property
    def is_on(self) -> bool:
        """Whether clients have to prove who they are."""
        return bool(self._methods)

    def principal(self, presented: Presented) -> Principal:
        """Who it is. Raises Unauthenticated."""
        if not self._methods:
            return ANYBODY
        for method in self._methods:
            principal = method.principal(presented)
            if principal is None:
                continue
            if principal.expires_s is not None and principal.expires_s <= self._wall_clock():
                expired = Unauthenticated("the credential has expired; ask the operator of the server for a new one")
                raise expired.of(replace(principal, roles=frozenset()))
            return principal
        if presented.token:
            raise Unauthenticated(f"the token is not one that this server knows; {_HOW}")
        raise Unauthenticated(f"this server needs a credential; {_HOW}")
