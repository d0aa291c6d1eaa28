"""Adapter weights in host memory (Redis), shared by all workers. Never trusted for truth."""
