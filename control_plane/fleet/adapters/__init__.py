"""Adapters on their way to and from the workers: filling the host cache, and unloading everywhere."""
