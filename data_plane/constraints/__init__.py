"""Constraints of rows: which tokens a grammar allows next."""
