"""Results of measurements: kept for this machine, merged with those of other processes, measured anew when damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.native.folder import CacheFolder, unsealed
from kernels.native.measured import KEPT_FILES, Measurements, Results, best_times_s

MACHINE = {"cpu": "a", "num_threads": 2}


def start(folder: Path | None, *, again: bool = False, machine: dict[str, object] | None = None) -> Measurements:
    """The measurements of a process that starts now."""
    kept = None if folder is None else CacheFolder(folder)
    return Measurements(kept, machine or MACHINE, again=again, now=lambda: 1000.5)


def gives(value: object) -> Callable[[], Results]:
    return lambda: {"value": value}


def fails() -> Results:
    raise AssertionError("it was measured again")


def test_a_result_is_measured_once_per_machine(tmp_path: Path) -> None:
    first = start(tmp_path)
    assert first.get("n", "k", gives(1)) == {"value": 1}
    assert first.get("n", "k", fails) == {"value": 1}
    assert start(tmp_path).get("n", "k", fails) == {"value": 1}
    whole = json.loads(unsealed((tmp_path / first.file_name).read_bytes()) or b"")
    assert whole == {
        "machine": {"cpu": "a", "num_threads": "2"},
        "measured": {"n": {"k": {"measured_at_s": 1000, "results": {"value": 1}}}},
    }


def test_the_first_start_gets_what_later_ones_read(tmp_path: Path) -> None:
    value = start(tmp_path).get("n", "k", lambda: {1: (2, 3)})  # type: ignore[dict-item]
    assert value == start(tmp_path).get("n", "k", fails) == {"1": [2, 3]}


def test_names_keys_and_machines_are_distinguished(tmp_path: Path) -> None:
    store = start(tmp_path)
    assert store.get("n", "k", gives(1)) == {"value": 1}
    assert store.get("n", "other", gives(2)) == {"value": 2}
    assert store.get("other", "k", gives(3)) == {"value": 3}
    assert start(tmp_path, machine={"cpu": "b", "num_threads": 2}).get("n", "k", gives(4)) == {"value": 4}
    assert start(tmp_path).get("n", "other", fails) == {"value": 2}


def test_what_another_process_wrote_meanwhile_stays(tmp_path: Path) -> None:
    one, other = start(tmp_path), start(tmp_path)

    def measure() -> Results:
        other.get("n", "k", gives("other"))
        other.get("n", "more", gives("more"))
        return {"value": "one"}

    assert one.get("n", "k", measure) == {"value": "other"}  # so that both choose the same
    assert one.get("n", "second", gives("second")) == {"value": "second"}
    later = start(tmp_path)
    assert [later.get("n", key, fails) for key in ("k", "more", "second")] == [
        {"value": "other"},
        {"value": "more"},
        {"value": "second"},
    ]


def test_forced_each_result_is_measured_once_and_replaced(tmp_path: Path) -> None:
    start(tmp_path).get("n", "k", gives(1))
    start(tmp_path).get("n", "other", gives(2))
    forced = start(tmp_path, again=True)
    assert forced.get("n", "k", gives(3)) == {"value": 3}
    assert forced.get("n", "k", fails) == {"value": 3}
    later = start(tmp_path)
    assert later.get("n", "k", fails) == {"value": 3}
    assert later.get("n", "other", fails) == {"value": 2}


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"{}", b'{"measured": []}', b'{"measured": {"n": []}}', b'{"measured": {"n": {"k": 1}}}'],
)
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_file_that_makes_no_sense_is_measured_anew(content: bytes, *, is_sealed: bool, tmp_path: Path) -> None:
    store = start(tmp_path)
    path = CacheFolder(tmp_path).write(store.file_name, content)
    if not is_sealed:
        path.write_bytes(content)
    assert store.get("n", "k", gives(1)) == {"value": 1}
    assert start(tmp_path).get("n", "k", fails) == {"value": 1}


def test_without_a_folder_results_live_in_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file" / "below"):
        store = start(folder)
        assert store.get("n", "k", gives(1)) == {"value": 1}
        assert store.get("n", "k", fails) == {"value": 1}
    assert "measurements are not kept" in caplog.text


def test_files_of_a_few_machines_stay(tmp_path: Path) -> None:
    for number in range(KEPT_FILES + 3):
        start(tmp_path, machine={"cpu": number}).get("n", "k", gives(number))
    assert len(list(tmp_path.glob("measured-*.json"))) == KEPT_FILES


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_best_time_of_each_way_counts() -> None:
    clock = FakeClock()
    times = {"fast": [3.0, 1.0, 2.0, 2.0], "slow": [5.0, 6.0, 7.0, 4.0]}
    order: list[str] = []

    def call(way: str) -> Callable[[], None]:
        def run() -> None:
            order.append(way)
            clock.now_s += times[way].pop(0)

        return run

    calls = {way: [call(way), call(way)] for way in times}
    assert best_times_s(calls, budget_s=0.0, clock=clock) == {"fast": 1.0, "slow": 4.0}
    assert order == ["fast", "fast", "slow", "slow"] * 2


def test_turns_go_on_while_the_budget_lasts() -> None:
    clock = FakeClock()
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        clock.now_s += 1.0

    best_times_s({"one": [call]}, budget_s=4.5, clock=clock)
    assert count == 5
