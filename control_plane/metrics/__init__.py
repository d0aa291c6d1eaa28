"""Prometheus metrics: `request_metrics.py` counts as requests end, `system_metrics.py` reads the rest at a scrape.

`vllm_names.py` shows the same numbers under the names that routers and dashboards know; `port.py` serves both.
"""
