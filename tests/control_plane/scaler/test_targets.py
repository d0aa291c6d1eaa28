"""What the metadata of a trigger means."""

from __future__ import annotations

import pytest

from control_plane.errors import InvalidRequest
from control_plane.fleet.workload import Workload
from control_plane.scaler.targets import read_targets

KEDA = {"scalerAddress": "motet-control-plane:50053", "caCert": "...", "tlsClientCert": "...", "enableTLS": "true"}
BUSY = Workload(
    num_requests=100, num_waiting=20, num_workers=2, num_rows_requested=120, rows_per_worker=64.0, full_workers=0.5
)


def test_without_keys_of_motet_workers_are_filled_to_eight_tenths() -> None:
    targets = read_targets(KEDA)
    assert targets.specs() == [("motet-wanted-workers", 1.0)]
    assert targets.value("motet-wanted-workers", BUSY) == pytest.approx(120 / 64 / 0.8)


def test_further_metrics_are_used_where_they_are_named() -> None:
    targets = read_targets(KEDA | {"motetTargetLoad": "0.5", "motetTargetWaiting": "4", "motetTargetRows": "32.5"})
    assert targets.specs() == [
        ("motet-wanted-workers", 1.0),
        ("motet-requests-waiting", 4.0),
        ("motet-rows-requested", 32.5),
    ]
    values = {name: targets.value(name, BUSY) for name, _ in targets.specs()}
    assert values == {
        "motet-wanted-workers": pytest.approx(120 / 64 / 0.5),
        "motet-requests-waiting": 20.0,
        "motet-rows-requested": 120.0,
    }


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("motetTargetLoad", "0", "'0' is not a part of a worker's rows or KV blocks; give one above 0 and at most 1"),
        ("motetTargetLoad", "1.5", "at most 1"),
        ("motetTargetLoad", "nan", "'nan' is not a part"),
        ("motetTargetWaiting", "-3", "'-3' is not a number of requests; give one above 0"),
        ("motetTargetWaiting", "many", "'many' is not a number of requests"),
        ("motetTargetRows", "inf", "'inf' is not a number of rows"),
        ("motetTargetWating", "5", "'motetTargetWating' is not a key that Motet has; use motetTargetLoad, "),
        ("motet\nforged", "5", r"'motet\nforged' is not a key"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(key: str, value: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_targets(KEDA | {key: value})
    assert said in str(caught.value) and "scalerMetadata" in str(caught.value)


def test_a_metric_that_the_scaled_object_does_not_use_is_refused() -> None:
    for name in ("motet-requests-waiting", "cpu", ""):
        with pytest.raises(InvalidRequest, match="is not a metric of this ScaledObject; use motet-wanted-workers"):
            read_targets(KEDA).value(name, BUSY)
