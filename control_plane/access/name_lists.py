"""Two files of the operator: which workers may attach, and which certificates are refused. One entry a line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from contract.ids import WORKER_ID_FORM, is_worker_id
from contract.process_log import printable
from control_plane.access.identity_names import IDENTITY_FORM, identity
from control_plane.access.peer_certificate import PeerCertificate

_FINGERPRINT = "sha256:"
_HEX_DIGITS = re.compile(r"[0-9a-f]{64}")
_WORKER_URI = re.compile(r"spiffe://[^/]+/motet/worker/([^/]+)")


@dataclass(frozen=True, slots=True)
class DenyList:
    """Certificates that are refused although an authority signed them."""

    names: frozenset[str] = frozenset()  # identities and worker ids, lower-case
    fingerprints: frozenset[str] = frozenset()

    def names_any_of(self, certificate: PeerCertificate) -> bool:
        """Whether the certificate is listed: by a name, by the worker id that it proves, or by its fingerprint."""
        if certificate.fingerprint in self.fingerprints:
            return True
        listed = {name.lower() for name in certificate.identities} | worker_ids_of(certificate)
        return not self.names.isdisjoint(listed)


def worker_ids_of(certificate: PeerCertificate) -> set[str]:
    """The ids that a certificate proves: of URIs spiffe://TRUST/motet/worker/ID, and DNS names that are an id."""
    matches = map(_WORKER_URI.fullmatch, certificate.uris)
    return {match[1] for match in matches if match is not None} | set(certificate.dns_names)


def parse_deny_list(content: bytes) -> DenyList:
    """Raises ValueError, which has the number of the line."""
    names, fingerprints = set[str](), set[str]()
    for number, entry in _entries(content):
        if (name := identity(entry) or (entry if is_worker_id(entry) else None)) is not None:
            names.add(name.lower())
            continue
        if not entry.lower().startswith(_FINGERPRINT):
            raise ValueError(
                f"line {number}: {printable(entry, 80)!r} is not the name of a certificate; {IDENTITY_FORM}, a worker "
                "id, or sha256: and the certificate's fingerprint"
            )
        digits = entry[len(_FINGERPRINT) :].replace(":", "").lower()
        if not _HEX_DIGITS.fullmatch(digits):
            raise ValueError(f"line {number}: {printable(entry, 80)!r} is not sha256: and 64 hexadecimal digits")
        fingerprints.add(digits)
    return DenyList(frozenset(names), frozenset(fingerprints))


def parse_worker_list(content: bytes) -> frozenset[str]:
    """Raises ValueError, which has the number of the line."""
    ids = set[str]()
    for number, entry in _entries(content):
        if not is_worker_id(entry):
            raise ValueError(f"line {number}: {printable(entry, 80)!r} is not a valid worker id: {WORKER_ID_FORM}")
        ids.add(entry)
    return frozenset(ids)


def _entries(content: bytes) -> Iterator[tuple[int, str]]:
    """Numbers and entries of the lines that have one. What follows a # is a comment. Raises ValueError."""
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError("is not UTF-8 text") from error
    for number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        if len(entry.split()) > 1:
            raise ValueError(f"line {number}: {printable(entry, 80)!r} has a space; write one entry a line")
        yield number, entry
