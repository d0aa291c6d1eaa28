"""What a worker counts of its steps and loads."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from data_plane.adapters.format.host_tier import HostTierStats
from data_plane.errors import ConfigError
from data_plane.metrics import STEPS_AT_ONCE, WorkerMetrics
from data_plane.plan import StepOutput
from data_plane.worker import check_metrics_listen
from tests.data_plane.engine.planner import array, make_plan


class Slots:
    def used_bytes(self) -> int:
        return 77


class AnEngine:
    slots = Slots()


def output(
    rows: list[int], *, failed: list[int] | None = None, waiting: list[int] | None = None, moved: int = 0
) -> StepOutput:
    return StepOutput(
        1,
        array(rows),
        array(rows),
        array(failed or []),
        2000,
        num_moved_blocks=moved,
        move_time_us=500 * moved,
        waiting_rows=array(waiting or []),
    )


class Shown:
    def __init__(self) -> None:
        stats = HostTierStats(num_hits=3, num_misses=2, num_adapters=1, used_bytes=500, budget_bytes=900)
        self.metrics = WorkerMetrics(AnEngine(), lambda: stats)  # type: ignore[arg-type]  # what the metrics read of it
        self.is_attached = False
        self.port = self.metrics.open_port("127.0.0.1:0", lambda: self.is_attached)

    def values(self) -> dict[tuple[str, str], float]:
        """By name and the value of its label."""
        with urllib.request.urlopen(f"http://{self.port.address}/metrics") as response:
            text = response.read().decode()
        return {
            (sample.name, "".join(value for label, value in sample.labels.items() if label != "le")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.mark.parametrize("num_steps", [STEPS_AT_ONCE - 1, STEPS_AT_ONCE, 2 * STEPS_AT_ONCE + 1])
def test_every_page_has_all_steps_however_many_are_counted_together(num_steps: int) -> None:
    shown = Shown()
    for number in range(num_steps):
        shown.metrics.on_step(make_plan(), output([0, 1]))
        if number % 50 == 0:
            assert shown.values()["motet_step_seconds_count", "decode"] == number + 1
    for _ in range(2):
        values = shown.values()
        assert values["motet_step_seconds_count", "decode"] == num_steps
        assert values["motet_step_tokens_total", "decode"] == 2 * num_steps


def test_steps_are_counted_by_kind_with_rows_and_tokens() -> None:
    shown = Shown()
    on_step = shown.metrics.on_step
    on_step(make_plan(prefills=[(0, 16)]), output([]))  # a part of a prompt
    on_step(make_plan(prefills=[(0, 4), (1, 8)]), output([0, 1]))  # two prompts end
    on_step(make_plan(prefills=[(2, 5)]), output([0, 1, 2]))  # one ends beside two that decode
    on_step(make_plan(), replace(output([]), num_drafted=3, num_accepted=2))
    on_step(make_plan(), output([0], failed=[2], waiting=[1], moved=3))
    values = shown.values()
    kinds = {kind: values["motet_step_seconds_count", kind] for kind in ("prefill", "mixed", "decode", "empty")}
    assert kinds == {"prefill": 2, "mixed": 1, "decode": 1, "empty": 1}
    assert values["motet_step_seconds_sum", "prefill"] == pytest.approx(0.004)
    assert values["motet_step_tokens_total", "prefill"] == 33 and values["motet_step_rows_total", "prefill"] == 4
    assert values["motet_step_tokens_total", "decode"] == 5 and values["motet_step_rows_total", "decode"] == 5
    assert values["motet_step_failed_rows_total", ""] == 1
    assert values["motet_drafted_tokens_total", ""] == 3 and values["motet_accepted_tokens_total", ""] == 2
    assert values["motet_step_waiting_rows_total", ""] == 1
    assert values["motet_moved_kv_blocks_total", ""] == 3
    assert values["motet_move_seconds_total", ""] == pytest.approx(0.0015)
    shown.port.close()


def test_loads_memory_and_readiness() -> None:
    shown = Shown()
    shown.metrics.on_load(0.2, True)
    shown.metrics.on_load(3.0, False)
    values = shown.values()
    assert values["motet_adapter_load_seconds_sum", "ready"] == 0.2
    assert values["motet_adapter_load_seconds_count", "failed"] == 1
    assert values["motet_worker_arena_used_bytes", ""] == 77
    assert values["motet_pinned_loads_total", "hit"] == 3 and values["motet_pinned_loads_total", "miss"] == 2
    assert values["motet_pinned_used_bytes", ""] == 500
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"http://{shown.port.address}/readyz")
    shown.is_attached = True
    with urllib.request.urlopen(f"http://{shown.port.address}/readyz") as response:
        assert response.status == 200
    with pytest.raises(ValueError, match=r"--worker-metrics-listen: .* cannot be listened on"):
        shown.metrics.open_port(shown.port.address, lambda: True)
    shown.port.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_another_method_than_get_is_405(method: str) -> None:
    shown = Shown()
    request = urllib.request.Request(f"http://{shown.port.address}/metrics", data=b"x", method=method)
    with pytest.raises(urllib.error.HTTPError, match="405") as caught:
        urllib.request.urlopen(request)
    assert caught.value.headers["Allow"] == "GET" and b"GET is" in caught.value.read()
    shown.port.close()


def test_a_port_in_use_is_known_before_the_weights_are_read() -> None:
    shown = Shown()
    said = f"--worker-metrics-listen: {shown.port.address} cannot be listened on: Address already in use; give another"
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_metrics_listen(shown.port.address)
    shown.port.close()
    check_metrics_listen(shown.port.address)


def test_a_row_that_fails_at_the_end_of_its_prompt_is_one_of_the_prefill() -> None:
    shown = Shown()
    shown.metrics.on_step(make_plan(prefills=[(0, 4)]), output([], failed=[0]))
    values = shown.values()
    assert values["motet_step_seconds_count", "prefill"] == 1
    assert values["motet_step_rows_total", "decode"] == 0
    shown.port.close()
