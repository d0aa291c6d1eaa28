"""Checkpoints to runnable models."""
