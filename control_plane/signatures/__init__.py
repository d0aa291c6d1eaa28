"""Signatures of adapters: who is trusted, and whether the files are those that were signed."""
