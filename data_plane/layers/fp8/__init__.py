"""Linears whose weights and inputs are FP8 numbers."""
