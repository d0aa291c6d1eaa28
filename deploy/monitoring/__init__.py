"""Dashboards of Grafana and rules of Prometheus: defined once, written by `make monitoring`, tried by
`make check-monitoring`."""
