"""What an operator may name as a remote root, and which place below it a client's text names. No I/O.

A client's text has a path and, on a Hub, a revision. It never becomes a scheme, a host, or a part of a query.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from control_plane.checks import quoted
from control_plane.errors import PathNotAllowed

HUB_SCHEME = "hf"
BUCKET_SCHEMES = ("s3", "gs", "az")
DEFAULT_REVISION = "main"
MAX_SOURCE_BYTES = 1024
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+ -]{0,127}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")


@dataclass(frozen=True, slots=True)
class RemoteRoot:
    """A place outside this machine whose adapters may be registered."""

    name: str
    scheme: str  # hf, s3, gs or az
    url: str  # without a slash at the end
    prefix: tuple[str, ...]  # on a Hub: organisation, repository, folders, as far as the operator gave them

    def place(self, source: str) -> tuple[tuple[str, ...], str]:
        """Path below the root, and the revision ("" in a bucket). Raises PathNotAllowed.

        On a Hub the two first parts of prefix and path are the repository.
        """
        _, _, relative = source.partition("/")
        named, sign, revision = source.rpartition("@")
        if self.scheme == HUB_SCHEME and sign:
            _, _, relative = named.partition("/")
            if not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision:
                raise PathNotAllowed(
                    f"source {quoted(source)}: {quoted(revision)} is not a revision; use a branch, a tag or a commit"
                )
        elif self.scheme == HUB_SCHEME:
            revision = DEFAULT_REVISION
        elif sign:
            raise PathNotAllowed(f"source {quoted(source)}: a path in a bucket has no @revision; name the path alone")
        else:
            revision = ""
        parts = tuple(relative.split("/")) if relative else ()
        if len(source) > MAX_SOURCE_BYTES or not all(_PART.fullmatch(part) for part in parts):
            raise PathNotAllowed(
                f"source {quoted(source)}: not a plain relative path below its root; parts begin with a letter, a "
                "digit or _, and have . - + = and spaces beside these"
            )
        if self.scheme == HUB_SCHEME and len(self.prefix) + len(parts) < 2:
            raise PathNotAllowed(
                f"source {quoted(source)}: names no repository; give {self.name}/REPOSITORY[@REVISION]"
            )
        if self.scheme != HUB_SCHEME and not parts:
            raise PathNotAllowed(f"source {quoted(source)}: names no directory; give {self.name}/PATH")
        return parts, revision


def remote_root(name: str, url: str) -> RemoteRoot:
    """The root that an operator gave. Raises ValueError without the URL, which may hold a secret."""
    scheme, _, rest = url.partition("://")
    if scheme not in (HUB_SCHEME, *BUCKET_SCHEMES):
        known = ", ".join(f"{each}://" for each in (HUB_SCHEME, *BUCKET_SCHEMES))
        raise ValueError(f"{scheme[:16]}:// cannot be a root; use a directory, or a URL of {known}")
    parts = urlsplit(url)
    if "@" in rest or "?" in url or "#" in url:
        raise ValueError(
            f"{scheme}:// has '@', '?' or '#'; credentials belong into the environment, and revisions to clients"
        )
    if not parts.netloc:
        raise ValueError(f"{scheme}:// names {'no organisation' if scheme == HUB_SCHEME else 'no bucket'}")
    prefix = tuple(rest.rstrip("/").split("/"))
    if scheme == HUB_SCHEME and not all(_PART.fullmatch(part) for part in prefix):
        raise ValueError(f"{scheme}:// is followed by ORGANISATION[/REPOSITORY[/FOLDER]]")
    return RemoteRoot(name, scheme, url.rstrip("/"), prefix)
