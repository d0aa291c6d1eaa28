"""Mixtures of experts: which of their parts take adapters, and how these are put in."""
