"""Measures the engine alone, in one process and without a server: what a step takes, and of what parts."""
