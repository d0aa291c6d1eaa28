"""Each measurement of adapters runs over a small system, and its figures are those of what happened."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.adapters.__main__ import main
from benchmarks.adapters.memory import Process, growth_bytes
from benchmarks.adapters.rig import percentile
from benchmarks.adapters.timed_worker import Journal, read_journal
from benchmarks.adapters.zipf import Run, limit_ms, trace


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(cache: Path, work_dir: Path, *arguments: str) -> tuple[int, list[dict[str, object]]]:
    out = work_dir / "report.json"
    status = main([*arguments, "--cache", str(cache), "--work-dir", str(work_dir), "--out", str(out)])
    return status, json.loads(out.read_text(encoding="utf-8"))["results"]


@pytest.mark.slow
def test_first_tokens_are_measured_in_every_tier(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(cache, tmp_path, "first-token", "--model-shape", "tiny", "--ranks", "2", "--repeats", "2")
    assert status == 0
    assert [one["tier"] for one in found] == ["base model", "arena", "host cache", "disk"]
    assert all(len(one["times_ms"]) == 2 for one in found)  # type: ignore[arg-type]
    assert "host cache" in capsys.readouterr().out


@pytest.mark.slow
def test_requests_over_room_for_few_load_adapters_and_those_over_room_for_all_do_not(
    cache: Path, tmp_path: Path
) -> None:
    sizes = ["--adapters", "6", "--room", "3", "--requests", "24", "--concurrency", "2"]
    status, (resident, few) = run(cache, tmp_path, "zipf", "--model-shape", "tiny", *sizes)
    assert status in (0, 1)  # whether a step was stalled depends on what else the machine does
    assert (resident["found_in"], resident["loads_ms"]) == ({"arena": 24}, [])
    assert isinstance(few["found_in"], dict) and isinstance(few["loads_ms"], list)
    assert sum(few["found_in"].values()) == 24
    assert few["loads_ms"] and few["found_in"]["arena"] < 24
    for one in (resident, few):
        assert len(one["first_token_ms"]) == 24 and one["steps_ms"]  # type: ignore[arg-type]


@pytest.mark.slow
def test_trainers_push_until_the_time_is_over(cache: Path, tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--ranks", "2", "--trainers", "2", "--seconds", "0"]
    status, (found,) = run(cache, tmp_path, "pushes", *sizes)
    assert status == 0
    assert len(found["calls_ms"]) == len(found["visible_ms"]) == 2, "one push of each"  # type: ignore[arg-type]


@pytest.mark.slow
def test_memory_is_sampled_of_every_process(cache: Path, tmp_path: Path) -> None:
    sizes = ["--adapters", "6", "--room", "3", "--seconds", "4", "--warm-up-s", "1", "--concurrency", "2"]
    status, (found,) = run(cache, tmp_path, "memory", *sizes)
    assert status in (0, 1)  # in so short a time processes still grow
    assert found["num_loads"] and found["num_requests"]
    assert isinstance(found["processes"], list)
    assert [one["role"] for one in found["processes"]] == ["control plane", "worker", "redis"]
    *_, redis = found["processes"]
    assert len(redis["held_bytes"]) == len(redis["resident_bytes"]), "every sample has both"


def test_a_decode_above_twice_the_99th_percentile_with_room_for_all_is_stalled() -> None:
    resident = Run(200, steps_ms=[900.0], decodes_ms=[10.0] * 99 + [500.0])
    assert limit_ms([resident]) == 20.0
    few = Run(16, steps_ms=[800.0], decodes_ms=[19.0, 20.0, 20.1, 300.0])
    assert few.num_stalled(limit_ms([resident, few])) == 2


@pytest.mark.parametrize(("mib_each_minute", "is_flat"), [(0.0, True), (0.3, True), (0.5, False)])
def test_a_process_is_flat_if_its_line_rises_by_little(mib_each_minute: float, *, is_flat: bool) -> None:
    times_s = [100.0 + second for second in range(0, 481, 10)]
    wobble = (0, 1 << 20)
    sizes = [
        (100 + mib_each_minute * (time_s - 100) / 60) * 2**20 + wobble[index % 2]
        for index, time_s in enumerate(times_s)
    ]
    process = Process("worker", times_s, sizes)
    assert growth_bytes(times_s, sizes) / 2**20 == pytest.approx(mib_each_minute * 8, abs=0.4)
    assert process.is_flat == is_flat


@pytest.mark.parametrize(
    ("held_mib", "resident_mib", "is_flat"),
    [((65, 65), (70, 78), True), ((65, 69), (70, 74), False), ((65, 65), (80, 92), False)],
    ids=["its heap grows", "what it holds grows", "its heap is 1.4 times that"],
)
def test_redis_is_judged_by_what_it_holds(
    held_mib: tuple[int, int], resident_mib: tuple[int, int], *, is_flat: bool
) -> None:
    held, resident = ([value * 2.0**20 for value in values] for values in (held_mib, resident_mib))
    assert Process("redis", [0.0, 480.0], resident, held).is_flat == is_flat


def test_the_trace_is_seeded_and_follows_zipfs_law() -> None:
    drawn = Counter(adapter for adapter, _ in trace(20_000, 200, 1.0))
    assert trace(50, 200, 1.0) == trace(50, 200, 1.0)
    harmonic = sum(1 / rank for rank in range(1, 201))
    for rank in (1, 2, 4):
        assert drawn[rank - 1] / 20_000 == pytest.approx(1 / rank / harmonic, rel=0.15)


def test_the_percentile_is_one_of_the_values() -> None:
    assert [percentile([3.0, 1.0, 2.0], percent) for percent in (0, 50, 99, 100)] == [1.0, 2.0, 3.0, 3.0]


def test_an_entry_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.add(b"s", 5_000_000_000, 3, 32)
    journal.add(b"l", 6_000_000_000)
    path.write_bytes(path.read_bytes() + b"s123")
    step, load = read_journal(path)
    assert (step.is_load, step.begin_s, step.num_rows, step.num_prompt_tokens) == (False, 5.0, 3, 32)
    assert load.is_load and load.begin_s == 6.0 and load.end_s >= load.begin_s
