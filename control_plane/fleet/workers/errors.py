"""What the fleet raises towards itself. The errors that clients get are in control_plane.errors."""

from __future__ import annotations


class GarbageResult(Exception):
    """What the worker sent contradicts the plans that it got: nothing that it sends can be trusted."""
