"""Embeddings and classes."""
