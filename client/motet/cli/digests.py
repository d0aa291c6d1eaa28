"""Versions as people give them: "@" with a number or a label, or the first digits of a digest."""

from __future__ import annotations

import re

from motet.client import Client
from motet.errors import NotFound, invalid_field
from motet.types import AdapterVersion

DIGEST_DIGITS = 64
SHORT_DIGITS = 12  # as tables show a digest
_LEAST_DIGITS = 8
_DIGITS = re.compile(r"[0-9a-f]+")


VERSION_HELP = "@NUMBER, @LABEL, the digest, or at least 8 digits that begin it"


def named(version: AdapterVersion | None) -> str:
    """A version in a sentence."""
    return "no version" if version is None else f"version {version.number} ({version.digest[:SHORT_DIGITS]})"


def full_digest(client: Client, adapter: str, given: str, *, field: str) -> str:
    """The digest of the adapter's one version that has the number or label after "@", or begins with `given`.

    A digest in full is taken as it is. Raises InvalidArgument on `field`, NotFound.
    """
    if len(given) == DIGEST_DIGITS:
        return given
    show = f"motet adapters versions {adapter}"
    if given.startswith("@"):
        name = given[1:]
        for version in client.adapters.versions(adapter, page_size=1000):
            if str(version.number) == name or name in version.version_labels:
                return version.digest
        raise NotFound(
            f"{field}: adapter {adapter!r} has no version of number or label {name!r}; `{show}` shows them",
            reason="ADAPTER_NOT_FOUND",
        )
    if not _LEAST_DIGITS <= len(given) < DIGEST_DIGITS or not _DIGITS.fullmatch(given):
        raise invalid_field(
            field,
            f"{given!r} does not name a version: give @NUMBER, @LABEL, or {_LEAST_DIGITS} to {DIGEST_DIGITS} digits of "
            f"its digest, as `{show}` shows them",
        )
    found = [version.digest for version in client.adapters.versions(adapter, page_size=1000)]
    matches = [digest for digest in found if digest.startswith(given)]
    if not matches:
        raise NotFound(
            f"{field}: adapter {adapter!r} has no version whose digest begins with {given}; `{show}` shows them",
            reason="ADAPTER_NOT_FOUND",
        )
    if len(matches) > 1:
        some = ", ".join(digest[: len(given) + 8] for digest in matches[:3])
        raise invalid_field(
            field, f"{given} begins the digests of {len(matches)} versions of {adapter!r} ({some}); give more digits"
        )
    return matches[0]
