"""Embeddings and classes: their calls, and the commands that make them."""
