"""Chunks of the packed layout: what is in them, and how they are written a few MiB at a time."""
