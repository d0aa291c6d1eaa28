"""What the fleet raises towards itself; what clients are told is in control_plane.errors."""

from __future__ import annotations


class GarbageResult(Exception):
    """The worker's answer contradicts what it was told to do: nothing it says can be trusted."""
