"""The credential that a client sends with every call: an API key or a token. Never shown, logged or put into an error.

A key is not sent in plaintext to another machine unless the user allows it: everybody on the way could read it.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from motet.errors import InvalidArgument, invalid_field

ApiKey: TypeAlias = str | Callable[[], str]

API_KEY_VARIABLE = "MOTET_API_KEY"
AUTHORIZATION_KEY = "authorization"  # metadata
MAX_KEY_CHARS = 4096  # the server reads no longer ones
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_CHARS}}}")

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class Credential:
    """What proves to the server who calls; nothing, if there is no key."""

    def __init__(
        self,
        api_key: ApiKey | None,
        target: str,
        *,
        has_tls: bool,
        may_send_plaintext: bool,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`api_key`: None takes the key of the environment; "" sends none. Raises InvalidArgument."""
        given = environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
        if isinstance(given, str):
            given = given.strip()
        self._api_key: ApiKey = given if callable(given) or not given else _checked(given)
        if self._api_key and not (has_tls or may_send_plaintext or is_this_machine(target)):
            where = "" if api_key is not None else f" (from {API_KEY_VARIABLE})"
            raise invalid_field(
                "api_key",
                f"would be sent in plaintext{where} to {target}, which is another machine; turn TLS on (tls_ca, "
                "--tls-ca), or allow it where nobody can read the traffic (allow_plaintext_key=True, --insecure)",
            )

    @property
    def is_given(self) -> bool:
        """Whether there is a key."""
        return bool(self._api_key)

    def metadata(self) -> Metadata:
        """What to send with one attempt of a call. Raises InvalidArgument, or what the user's function raises."""
        if not self._api_key:
            return ()
        key = _checked(self._api_key()) if callable(self._api_key) else self._api_key
        return ((AUTHORIZATION_KEY, f"Bearer {key}"),)

    def __repr__(self) -> str:
        return f"Credential({'***' if self._api_key else ''})"


def is_this_machine(target: str) -> bool:
    """Whether what is sent to a gRPC address stays on this machine. A name other than localhost may be anything."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    for scheme in ("ipv4:", "ipv6:"):
        if target.startswith(scheme):
            return all(_is_loopback(address) for address in target.removeprefix(scheme).split(","))
    return _is_loopback(target.removeprefix("dns:").removeprefix("///"))


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0]
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(key: object) -> str:
    if isinstance(key, str) and _KEY.fullmatch(key.strip()):
        return key.strip()
    raise _invalid_key()


def _invalid_key() -> InvalidArgument:
    # The value is not repeated: it is a secret, or close to one.
    return invalid_field(
        "api_key", f"is not a key or token: it has 1 to {MAX_KEY_CHARS} printable ASCII characters and no space"
    )
