"""The comparison of verifications, and the directory of the process that computes their references."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from control_plane.adapters.reference_process import PackedFiles, Prompt, ReferenceProcess
from control_plane.adapters.verifier import (
    LEAST_TOLERANCE,
    MOST_TOLERANCE,
    ROUNDING,
    SPREAD,
    largest_difference,
    tolerance_of,
)
from control_plane.errors import PreconditionFailed, StoreUnavailable
from control_plane.registry.versions.verification import NOT_FINITE

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("rows", [[[NAN, 1.0]], [[1.0, NAN]], [[1.0], [0.0, NAN, 3.0]], [[INF, 0.0]], [[0.0, -INF]]])
def test_a_difference_that_is_no_number_is_the_largest_wherever_it_is(rows: list[list[float]]) -> None:
    zeros = [[0.0] * len(row) for row in rows]
    assert largest_difference(rows, zeros) == largest_difference(zeros, rows) == NOT_FINITE
    assert largest_difference([[-3.0, 1.0]], [[0.0, 0.0]]) == 3.0


def test_the_tolerance_follows_the_base_model_up_to_what_rounded_inputs_explain() -> None:
    assert tolerance_of("bfloat16", 0.001) == 0.07
    assert tolerance_of("bfloat16", 0.1) == ROUNDING * 0.1
    assert tolerance_of("bfloat16", 5.0) == MOST_TOLERANCE["bfloat16"]
    # Over FP8 weights an error of 0.4 is that of the inputs, and one of 5 is a mistake.
    assert tolerance_of("bfloat16", 0.4, base_rounding=0.5) == ROUNDING * 0.4
    assert tolerance_of("bfloat16", 5.0, base_rounding=0.5) == ROUNDING * 0.5
    assert tolerance_of("bfloat16", 5.0, base_rounding=0.01) == MOST_TOLERANCE["bfloat16"]
    # An adapter may make more of it.
    assert tolerance_of("bfloat16", 0.2, base_rounding=0.2, rounding=0.9) == SPREAD * 0.9


def test_errors_that_are_not_finite_allow_nothing() -> None:
    """Weights that overflow give no numbers with rounded inputs either: that is not a reason to pass."""
    assert tolerance_of("float32", 1e-6, rounding=NOT_FINITE) == LEAST_TOLERANCE["float32"]
    assert tolerance_of("float32", 1e-6, base_rounding=NOT_FINITE) == LEAST_TOLERANCE["float32"]
    assert tolerance_of("bfloat16", NOT_FINITE) == LEAST_TOLERANCE["bfloat16"]


def test_directories_that_a_killed_server_left_are_removed_at_the_next_start(tmp_path: Path) -> None:
    for name in ("verify-abc", "verify-def", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0").write_bytes(b"weights")
    reference = ReferenceProcess(tmp_path / "model", tmp_path, cast(Any, SimpleNamespace()))
    assert (reference.remove_leftovers(), reference.remove_leftovers()) == (2, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert ReferenceProcess(tmp_path, tmp_path / "absent", cast(Any, SimpleNamespace())).remove_leftovers() == 0


def test_the_words_of_a_process_that_failed_stay_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = tmp_path / "absent model"
    with caplog.at_level(logging.ERROR), pytest.raises(StoreUnavailable, match="status 1, and the server's log") as got:
        asyncio.run(PackedFiles(tmp_path, 0, secret).compute([Prompt((1, 2))]))
    assert str(tmp_path) not in str(got.value)
    assert "verifying process failed status=1: " in caplog.text and len(caplog.records) == 1


def test_a_refusal_of_the_process_reaches_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"open({str(tmp_path / 'refusal.txt')!r}, 'w').write('w1 cannot be verified yet'); raise SystemExit(3)"
    monkeypatch.setattr(
        "control_plane.adapters.reference_process.module_command", lambda *_: (["python", "-c", program], None)
    )
    with pytest.raises(PreconditionFailed, match=r"^w1 cannot be verified yet$"):
        asyncio.run(PackedFiles(tmp_path, 0, tmp_path).compute([Prompt((1, 2))]))
