"""Refusals of the registry's routes: the body that all of `/v1` has, with Motet's own fields and reasons."""

from __future__ import annotations

from pathlib import Path

from motet import InvalidArgument, MotetError

from gateway.http.errors import Refusal, refusal_from
from gateway.openai.errors import FieldRefusal, renamed


def registry_refusal(error: MotetError | Refusal) -> Refusal:
    """`param` is the field of Motet's request that is wrong, `code` the reason (docs/errors.md) in lower case."""
    if isinstance(error, Refusal):
        return error
    plain = refusal_from(error)
    field = error.field_violations[0].field if error.field_violations else None
    refusal = FieldRefusal(plain.message, param=field or None, status=plain.status, code=error.reason.lower() or None)
    refusal.headers = plain.headers
    return refusal


def of_upload(error: InvalidArgument, directory: Path) -> Refusal:
    """The same about an upload that lies in `directory`, of which the caller knows nothing: it sent files."""
    refusal = registry_refusal(error)
    refusal.message = refusal.message.replace(str(directory), "the upload")
    return renamed(refusal, "files") if getattr(refusal, "param", None) == "directory" else refusal
