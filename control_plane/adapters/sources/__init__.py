"""Adapters that lie elsewhere: on a Hub and in buckets, below what the operator allows."""
