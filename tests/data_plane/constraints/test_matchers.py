"""Grammars where the library that follows them is missing."""

from __future__ import annotations

import sys

import pytest

from data_plane.constraints.matchers import ConstraintFailed, Matchers
from data_plane.plan import Vocabulary
from tests.data_plane.constraints.test_masks import row_of, vocabulary

__all__ = ["vocabulary"]  # a fixture


def test_a_constraint_fails_by_name_where_llguidance_is_missing(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = row_of(["yes", "no"], vocabulary).constraint
    assert constraint is not None
    monkeypatch.setitem(sys.modules, "llguidance", None)
    matchers = Matchers()
    matchers.read(vocabulary)  # is logged
    with pytest.raises(ConstraintFailed, match="the worker lacks the package llguidance: install it there"):
        matchers.find(constraint)
