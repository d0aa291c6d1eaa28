"""Buckets of histograms that control plane and worker both have, so that their numbers can be compared."""

from __future__ import annotations

# Loads of adapters into slots, seconds.
LOAD_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
