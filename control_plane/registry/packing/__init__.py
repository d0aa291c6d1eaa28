"""Packing in processes of their own."""
