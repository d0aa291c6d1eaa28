"""Scheduler settings are checked as a whole when they are built."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.scheduler.settings import SchedulerSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_step_tokens", 0),
        ("max_sequences", -1),
        ("long_prefill_tokens", 0),
        ("max_partial_prefills", 0),
        ("max_long_partial_prefills", 0),
        ("max_long_partial_prefills", 5),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("prefill_us_per_token", -1.0),
        ("swap_us_per_block", float("inf")),
        ("adapter_us_per_mib", float("nan")),
        ("step_us", -0.1),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: {value}"):
        SchedulerSettings(**{field: value})
