"""What the metrics of control plane and worker share: `port.py` serves them, `buckets.py` has common buckets."""
