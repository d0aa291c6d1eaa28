"""Merges packed adapters into base weights: of a model in memory (verify.py), and of a checkpoint's files."""
