"""Holds a loaded model's linears in FP8."""
