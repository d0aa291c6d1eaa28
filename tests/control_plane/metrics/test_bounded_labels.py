"""Labels that clients choose make a bounded number of series."""

from __future__ import annotations

from control_plane.metrics.bounded_labels import OTHER, BoundedLabels


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_values_have_series_and_the_others_share_one() -> None:
    labels = BoundedLabels(2, 60.0, Clock())
    assert [labels.label(value) for value in "abcab"] == ["a", "b", OTHER, "a", "b"]


def test_a_value_that_was_not_used_for_long_leaves_its_place_to_a_new_one() -> None:
    clock, lost = Clock(), list[str]()
    labels = BoundedLabels(2, 60.0, clock, lost.append)
    labels.label("a")
    clock.now_s = 30.0
    labels.label("b")
    clock.now_s = 59.0
    assert labels.label("c") == OTHER and lost == []
    clock.now_s = 60.0
    assert labels.label("c") == "c" and lost == ["a"]
    assert labels.label("a") == OTHER, "b was used 30 seconds ago"
