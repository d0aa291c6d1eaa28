"""Tensor operators, one folder per op. Knows tensors only. Imports nothing here: transformers probes this name."""

__version__ = "0.0.0"
