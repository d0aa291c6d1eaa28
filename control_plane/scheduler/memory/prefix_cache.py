"""Which full blocks hold which tokens: the prefix cache.

A block's key is a chained SHA-256 over all tokens up to its end, rooted in (adapter digest or base, tenant, cache
salt): equal keys mean equal tokens under the same weights for the same partition of the same tenant. Only full blocks
whose KV was computed enter.

An activated LoRA changes tokens from some position on. The blocks before the one with that position are the base
model's, and have its keys. The chain from there on starts with the adapter and the position: the same tokens may be
activated elsewhere.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from control_plane.scheduler.memory.block_pool import BlockPool
from control_plane.scheduler.requests.sequence import Row, Sequence
from control_plane.scheduler.types import TOKEN_BYTES, Request, digests_of

# Leading blocks of a prompt that placement looks up in the caches of workers: what lies beyond decides little, and
# hashing takes time.
MAX_PREFIX_BLOCKS = 128

_sha256 = hashlib.sha256


def chain_root(request: Request) -> bytes:
    """First link of the chain. Lengths are hashed too, so that no two of its parts run into each other.

    The tenant is one of them: a sender learns how much of a prompt is cached, and so what other senders requested.
    """
    name = b"base" if request.adapter is None or request.active_from else _adapters_of(request)
    return _root(name, request)


def activation_root(request: Request) -> bytes | None:
    """What the chain goes on with in the block where an activated LoRA begins; None for all other requests."""
    if not request.active_from:
        return None
    return _root(b"active from %d " % request.active_from + _adapters_of(request), request)


def _adapters_of(request: Request) -> bytes:
    composition = request.composition
    if composition is None:
        assert request.adapter is not None, "the base model has no adapters"
        return b"adapter:" + request.adapter.digest.encode()
    uses = b" ".join(b"%b*%b" % (use.ref.digest.encode(), struct.pack("<d", use.scale)) for use in composition.uses)
    return b"%b:%b" % (composition.combination.value.encode(), uses)


def _root(name: bytes, request: Request) -> bytes:
    parts = (name, request.tenant.encode(), request.cache_salt)
    return hashlib.sha256(b"motet prefix" + b"".join(b" %d:%b" % (len(part), part) for part in parts)).digest()


def chain_next(parent: bytes, token_ids: Collection[int]) -> bytes:
    """Key of a block with these tokens after the block (or root) with key `parent`."""
    return _sha256(parent + _packed(token_ids)).digest()


def _packed(token_ids: Collection[int]) -> bytes:
    return struct.pack(f"{len(token_ids)}i", *token_ids)


class PrefixCache:
    """Index of computed full blocks by key."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        # Invariant: the three maps name the same blocks, and those are the pool's cached blocks.
        self._block_by_key: dict[bytes, int] = {}
        self._key_by_block: dict[int, tuple[bytes, str | None]] = {}  # block_id -> (key, adapter digest)
        self._blocks_by_digest: dict[str | None, set[int]] = {}
        pool.on_evict = self._remove

    def __len__(self) -> int:
        return len(self._block_by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._block_by_key

    def extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Chain on until the sequence has the keys of its first `num_blocks` blocks; their tokens must be known."""
        hashes, size = sequence.block_hashes, self._block_size
        if len(hashes) >= num_blocks:
            return
        group = sequence.group
        key, switch = (hashes[-1] if hashes else group.cache_root), group.activation_root
        first = -1 if switch is None else sequence.request.active_from // size
        packed = _packed(sequence.tokens_between(len(hashes) * size, num_blocks * size))  # once for all: it is faster
        for begin in range(0, len(packed), TOKEN_BYTES * size):
            if len(hashes) == first and switch is not None:
                key = _sha256(switch + key).digest()
            key = _sha256(key + packed[begin : begin + TOKEN_BYTES * size]).digest()
            hashes.append(key)

    def find_hits(self, sequence: Sequence, max_blocks: int) -> list[int]:
        """The blocks of the leading keys that are in, at most `max_blocks`, whose tokens must be known.

        Hashes no further than to the first key that is not in.
        """
        blocks: list[int] = []
        hashes = sequence.block_hashes
        while (idx := len(blocks)) < max_blocks:
            if idx == len(hashes):
                self.extend_hashes(sequence, idx + 1)
            block_id = self._block_by_key.get(hashes[idx])
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def count_hits(self, sequence: Sequence, max_blocks: int) -> tuple[int, int]:
        """(leading blocks found, how many of them no table holds), at most `max_blocks`."""
        blocks = self.find_hits(sequence, max_blocks)
        return len(blocks), sum(self._pool.ref_counts[block_id] == 0 for block_id in blocks)

    def take_hits(self, sequence: Sequence, num_hits: int) -> list[int]:
        """The blocks that `count_hits` found, each held once more."""
        blocks = [self._block_by_key[key] for key in sequence.block_hashes[:num_hits]]
        self._pool.share_all(blocks)
        return blocks

    def register(self, row: Row, *, keep: bool) -> None:
        """Enter the row's blocks that are computed. If several blocks have one key, the first of them stays.

        With `keep` False nothing enters: the adapter is being purged.
        """
        sequence = row.sequence
        num_full = row.num_computed // self._block_size
        self.extend_hashes(sequence, num_full)
        if keep:
            digest, num_of_base = sequence.digest, sequence.request.active_from // self._block_size
            for idx in range(row.num_registered, num_full):
                key = sequence.block_hashes[idx]
                if key not in self._block_by_key:
                    its_digest = digest if idx >= num_of_base else None
                    self._enter(key, row.block_ids[idx], its_digest, sequence.request.account)
        row.note_registered(num_full, self._block_size)

    def _enter(self, key: bytes, block_id: int, digest: str | None, account: str) -> None:
        self._block_by_key[key] = block_id
        self._key_by_block[block_id] = (key, digest)
        blocks = self._blocks_by_digest.get(digest)
        if blocks is None:
            blocks = self._blocks_by_digest[digest] = set()
        blocks.add(block_id)
        self._pool.mark_cached(block_id, account)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Take these blocks out of the cache. Tables that hold them still do."""
        for block_id in block_ids:
            if block_id in self._key_by_block:
                self._remove(block_id)
                self._pool.unmark_cached(block_id)

    def purge(self, digest: str) -> None:
        """Take out every block of an adapter, those of combinations with it included."""
        for name in self._names_with(digest):
            self.forget(sorted(self._blocks_by_digest[name]))

    def has_digest(self, digest: str) -> bool:
        """Whether any block of the adapter is in, or of a combination with it."""
        return digest in self._blocks_by_digest or bool(self._names_with(digest))

    def has_blocks_of(self, name: str | None) -> bool:
        """Whether any block of the base model, the adapter or exactly this set of adapters is in."""
        return name in self._blocks_by_digest

    def _names_with(self, digest: str) -> list[str]:
        return [name for name in self._blocks_by_digest if name is not None and digest in digests_of(name)]

    def check_invariants(self) -> None:
        """Raise AssertionError if the maps and the pool disagree."""
        by_block = {block_id: key for block_id, (key, _) in self._key_by_block.items()}
        assert {b: k for k, b in self._block_by_key.items()} == by_block, "prefix cache maps disagree"
        marked = {block_id for block_id, flag in enumerate(self._pool.is_cached) if flag}
        assert marked == set(by_block), "blocks marked as cached are not the blocks in the prefix cache"
        by_digest: dict[str | None, set[int]] = {}
        for block_id, (_, digest) in self._key_by_block.items():
            by_digest.setdefault(digest, set()).add(block_id)
        assert by_digest == self._blocks_by_digest, "the prefix cache's index by digest is wrong"

    def _remove(self, block_id: int) -> None:
        key, digest = self._key_by_block.pop(block_id)
        del self._block_by_key[key]
        blocks = self._blocks_by_digest[digest]
        blocks.discard(block_id)
        if not blocks:
            del self._blocks_by_digest[digest]


@dataclass(slots=True)
class PrefixKeys:
    """Keys of the leading blocks of one request, made only as far as the prefix cache of some worker has them."""

    request: Request
    _by_block_size: dict[int, list[bytes]] = field(default_factory=dict)

    def num_hit_tokens(self, cache: PrefixCache, block_size: int) -> int:
        """Leading tokens of the request that the cache has, of at most MAX_PREFIX_BLOCKS blocks."""
        request = self.request
        name = None if request.active_from >= block_size else request.adapters_name
        if not cache.has_blocks_of(name):
            return 0
        most = min(MAX_PREFIX_BLOCKS, (len(self.request.prompt_token_ids) - 1) // block_size)
        keys = self._by_block_size.setdefault(block_size, [])
        num_hits = 0
        while num_hits < most:
            if num_hits == len(keys):
                self._extend(keys, block_size)
            if keys[num_hits] not in cache:
                break
            num_hits += 1
        return num_hits * block_size

    def _extend(self, keys: list[bytes], block_size: int) -> None:
        start = len(keys) * block_size
        parent = keys[-1] if keys else chain_root(self.request)
        switch = activation_root(self.request)
        if switch is not None and len(keys) == self.request.active_from // block_size:
            parent = _sha256(switch + parent).digest()
        keys.append(chain_next(parent, self.request.prompt_token_ids[start : start + block_size]))
