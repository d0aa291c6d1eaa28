"""Says whether the server still takes new work."""

from __future__ import annotations

from control_plane.errors import Draining


class DrainGate:
    """Open until the server begins to shut down; never opens again."""

    def __init__(self) -> None:
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def close(self) -> None:
        """From here on `check` refuses."""
        self._is_draining = True

    def check(self) -> None:
        """Raises Draining once the server shuts down."""
        if self._is_draining:
            raise Draining("the server is shutting down; try another one, or again in a moment")
