"""JSON-Schema-Test-Suite: every case comes to what `ratchet.json` records, no better and no worse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.control_plane.constraints.schema_suite import RATCHET, found_in, suite

RECORDED: dict[str, dict[str, Any]] = json.loads(RATCHET.read_text(encoding="utf-8"))


def test_every_file_is_recorded_with_all_its_cases() -> None:
    assert list(RECORDED) == list(suite())
    for name, groups in suite().items():
        recorded = RECORDED[name]
        refused = {group for groups in recorded["refused"].values() for group in groups}
        num_refused = sum(len(group["tests"]) for group in groups if group["description"] in refused)
        num_judged = recorded["passed"] + sum(map(len, recorded["stricter"].values())) + len(recorded["looser"])
        assert num_judged + num_refused == sum(len(group["tests"]) for group in groups), name


@pytest.mark.parametrize("name", suite())
def test_cases_come_to_what_is_recorded(name: str) -> None:
    """After a change that is meant: run `schema_suite.py` as it says, and read the difference."""
    assert found_in(name) == RECORDED[name]
