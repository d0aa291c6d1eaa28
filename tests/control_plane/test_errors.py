"""The one table from errors to status codes."""

from __future__ import annotations

import re

import grpc

from control_plane import errors


def every_class(cls: type[errors.MotetError] = errors.MotetError) -> list[type[errors.MotetError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in every_class(sub))]


def test_every_error_has_a_code_that_a_client_may_see() -> None:
    for cls in every_class():
        code = errors.status_of(cls.__new__(cls))
        assert code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN), cls
        assert (code is grpc.StatusCode.INTERNAL) == (cls is errors.MotetError), cls


def test_reasons_are_distinct_and_well_formed() -> None:
    reasons = [cls.reason for cls in every_class()]
    assert len(set(reasons)) == len(reasons)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]+[A-Z0-9]", reason) and len(reason) <= 63 for reason in reasons)


def test_the_most_exact_class_wins() -> None:
    assert errors.status_of(errors.QueueFull("x")) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert errors.status_of(errors.ShuttingDown("x")) is grpc.StatusCode.UNAVAILABLE
