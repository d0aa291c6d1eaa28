"""Adapters in directories of the operator: those named at the start, and those of a directory that is watched."""
