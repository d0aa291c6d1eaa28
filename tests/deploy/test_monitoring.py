"""Dashboards and rules in deploy/monitoring/ are those of their definitions, and use metrics that there are.

`make check-monitoring` tries every query with Prometheus on a live system; `make check-deploy` tests the rules.
"""

from __future__ import annotations

import re

import pytest

from deploy.monitoring.generate import FOLDER, contents
from deploy.monitoring.queries import ALERTS, DASHBOARDS, Alert
from tests.control_plane.server_processes import ROOT

DOCUMENT = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
METRIC = re.compile(r"\bmotet_[a-z_]+")
OF_HISTOGRAM = re.compile(r"_(bucket|count|sum)$")


@pytest.mark.parametrize("name", contents())
def test_a_committed_file_is_what_its_definition_makes(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == contents()[name], "run `make monitoring`"


def test_every_metric_is_documented() -> None:
    expressions = [query.expression for each in DASHBOARDS for panel in each.panels for query in panel.queries]
    expressions += [text for alert in ALERTS for text in (alert.expression, alert.evidence)]
    used = {OF_HISTOGRAM.sub("", name) for expression in expressions for name in METRIC.findall(expression)}
    assert len(used) > 30
    assert used <= set(METRIC.findall(DOCUMENT))


@pytest.mark.parametrize("prefix", ["slot", "host_cache", "weights", "redis", "store_call", "plan_stream", "pinned"])
def test_the_way_of_an_adapters_weights_is_shown(prefix: str) -> None:
    """Whether the host cache responds is an alert."""
    shown = " ".join(query.expression for each in DASHBOARDS for panel in each.panels for query in panel.queries)
    documented = {name for name in METRIC.findall(DOCUMENT) if name.startswith(f"motet_{prefix}_")}
    assert documented
    assert documented - {"motet_host_cache_available"} <= {OF_HISTOGRAM.sub("", name) for name in METRIC.findall(shown)}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_names_a_symptom_of_the_document_and_examples_of_its_own_metrics(alert: Alert) -> None:
    assert f"| {alert.symptom} |" in DOCUMENT
    metrics = set(METRIC.findall(alert.expression))
    for examples in (alert.fires_on, alert.quiet_on):
        assert {METRIC.findall(series)[0] for series in examples} == metrics
