"""Which subject alternative names are identities, and how each is written: for authentication, deny lists and workers.

Three types of name are: URIs with "://", DNS names in the form of a host name, and addresses. No text has the form of
two types, so a name that an authority signed as one type is never taken for another.
"""

from __future__ import annotations

import ipaddress
import re

IDENTITY_FORM = "use a URI with '://', a host name, or an IP address"

# Neither a space nor a "#": so a list with one entry a line, and comments, can name it.
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[!\"$-~]+")
_HOST_NAME = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_MAX_HOST_NAME_CHARS = 253


def uri_identity(text: str) -> str | None:
    """A URI as an identity; None if it is not one."""
    return text if _URI.fullmatch(text) else None


def dns_identity(text: str) -> str | None:
    """A DNS name as an identity, lower-case; None if it is not one."""
    name = text.lower()
    if not text.isascii() or len(name) > _MAX_HOST_NAME_CHARS or not _HOST_NAME.fullmatch(name):
        return None
    return None if address_identity(name) else name


def address_identity(text: str) -> str | None:
    """An IPv4 or IPv6 address as an identity, in its one short form; None if it is not one."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def identity(text: str) -> str | None:
    """What an operator wrote, as a certificate's identity of any type has it; None if none has this form."""
    return uri_identity(text) or address_identity(text) or dns_identity(text)
