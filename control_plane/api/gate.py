"""Says whether the server still takes new work."""

from __future__ import annotations

from control_plane.errors import ShuttingDown


class ShutdownGate:
    """Open until the server begins to shut down; never opens again."""

    def __init__(self) -> None:
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the server shuts down."""
        return self._is_closed

    def close(self) -> None:
        """From here on `check` refuses."""
        self._is_closed = True

    def check(self) -> None:
        """Raises ShuttingDown once the server shuts down."""
        if self._is_closed:
            raise ShuttingDown()
