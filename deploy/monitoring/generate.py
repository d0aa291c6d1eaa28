"""Writes the dashboards and rules of this folder: `make monitoring`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from deploy.monitoring.queries import ALERTS, DASHBOARDS, Alert, Dashboard, Panel

FOLDER = Path(__file__).resolve().parent
_RUNBOOK = "docs/observability.md#runbook"
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2  # of a panel, in Grafana's grid of 24 columns


def contents() -> dict[str, str]:
    """Every generated file by its name."""
    files = {f"{each.uid}.json": json.dumps(_dashboard(each), indent=1) + "\n" for each in DASHBOARDS}
    header = "# Made from queries.py by `make monitoring`. Do not edit.\n"
    rules = {"alerts.yml": _rules(), "alerts_test.yml": _rule_tests()}
    return files | {name: header + yaml.safe_dump(found, sort_keys=False, width=200) for name, found in rules.items()}


def _dashboard(dashboard: Dashboard) -> dict[str, Any]:
    variable = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["motet"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": {
            "x": number % _COLUMNS * _WIDTH,
            "y": number // _COLUMNS * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": source,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def _rules() -> dict[str, Any]:
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": _annotations(alert),
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "motet", "rules": rules}]}


def _annotations(alert: Alert) -> dict[str, str]:
    return {"summary": alert.summary, "runbook": f"{_RUNBOOK}: {alert.symptom}"}


def _rule_tests() -> dict[str, Any]:
    tests = []
    for alert in ALERTS:
        fired = {"exp_labels": {"severity": alert.severity}, "exp_annotations": _annotations(alert)}
        for series, expected in ((alert.fires_on, [fired]), (alert.quiet_on, [])):
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "alert_rule_test": [{"eval_time": "30m", "alertname": alert.name, "exp_alerts": expected}],
                }
            )
    return {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}


if __name__ == "__main__":
    for name, content in contents().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
        print(f"wrote deploy/monitoring/{name}")
