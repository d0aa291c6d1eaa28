"""Rounds the sizes of a step's launches up, so that steps of similar sizes launch the same grids.

Replaces Triton's own integer functions, which take microseconds on the host in every launch.
"""

from __future__ import annotations


def bucket(count: int) -> int:
    """The count or a little more: 0, powers of two to 64, then eighths of a power of two: 72, 80 .. 128, 144 .. 256.

    Programs that are not needed return at once: that costs little below 64, and above 64 they are at most an eighth.
    """
    if count <= 64:
        return round_up(count)
    step = round_up(count) // 16
    return ceil_div(count, step) * step


def round_up(count: int) -> int:
    """The next power of two; zero as zero."""
    if count < 0:
        raise ValueError(f"size is {count}, want at least 0")
    return 1 << (count - 1).bit_length() if count else 0


def ceil_div(count: int, size: int) -> int:
    """How many of a size hold the count."""
    return -(-count // size)


def check_power_of_two(name: str, value: int, least: int, most: int) -> None:
    """Raise ValueError, by name, for a value that is not a power of two, or is out of range."""
    if not least <= value <= most or value & (value - 1):
        raise ValueError(f"{name} is {value}, want a power of two from {least} to {most}")
