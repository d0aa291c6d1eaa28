"""Versions of a name: how they are named, registered, rolled out and kept."""
