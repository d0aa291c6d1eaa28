"""Where a packed adapter is in the host cache (docs/protocol.md): the control plane writes there, workers read."""

from __future__ import annotations

PREFIX = "motet:a:"  # of all keys of adapters
# Size of a chunk's parts, bytes; the last one may be shorter. A power of two costs 25% more memory in Redis.
PART_BYTES = (1 << 20) - 64


def manifest_key(digest: str) -> str:
    """Where an adapter's manifest is."""
    return f"{PREFIX}{digest}:manifest"


def part_key(digest: str, index: int, part: int) -> str:
    """Where one part of the chunk `index` is."""
    return f"{PREFIX}{digest}:{index}:{part}"


def num_parts(size_bytes: int) -> int:
    """Parts that a chunk is cut into; an empty chunk has one."""
    return max(1, -(-size_bytes // PART_BYTES))


def chunk_keys(digest: str, index: int, size_bytes: int) -> list[str]:
    """Where the parts of one chunk are, in order."""
    return [part_key(digest, index, part) for part in range(num_parts(size_bytes))]
