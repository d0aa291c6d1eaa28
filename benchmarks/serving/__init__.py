"""Measures the served system: seeded workloads through the SDK, figures as JSON and a chart, peers beside it."""
