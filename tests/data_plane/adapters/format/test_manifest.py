"""The hash of a chunk covers all that is read of it, so that tensors need no check of their own."""

from __future__ import annotations

import pytest
import torch

from data_plane.adapters.format.manifest import read_manifest, verify_chunk
from data_plane.adapters.format.packed import read_chunk
from data_plane.errors import AdapterCorrupt
from tests.data_plane.adapters.factories import pack


@pytest.mark.parametrize("vectors", ["", "magnitude"])
def test_every_byte_of_a_chunk_counts(vectors: str) -> None:
    packed = pack(2, vectors=vectors)
    entry, data = read_manifest(packed.manifest, packed.digest).chunks[0], packed.chunks[0]
    verify_chunk(entry, data, packed.digest)
    for position in range(len(data)):
        changed = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        with pytest.raises(AdapterCorrupt, match=r"chunk layers\.0 hashes to"):
            verify_chunk(entry, changed, packed.digest)


@pytest.mark.parametrize("vectors", ["", "bias", "magnitude"])
def test_the_tensors_of_a_chunk_are_all_of_its_bytes_behind_the_header(vectors: str) -> None:
    packed = pack(2, vectors=vectors, version=1)
    manifest = read_manifest(packed.manifest, packed.digest)
    for entry, data in zip(manifest.chunks, packed.chunks, strict=True):
        tensors = [tensor for read in read_chunk(manifest, entry, data) for tensor in read.tensors.values()]
        header = 8 + int.from_bytes(data[:8], "little")
        assert sum(tensor.nbytes for tensor in tensors) == len(data) - header
        found = sorted(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
        assert all(part in data[header:] for part in found)


def test_a_manifest_is_parsed_once_in_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(8, seed=31)
    first = read_manifest(packed.manifest, packed.digest)
    monkeypatch.setattr("data_plane.adapters.format.manifest.json", None)
    assert read_manifest(bytes(bytearray(packed.manifest)), packed.digest) is first


def test_other_bytes_under_the_digest_of_a_manifest_that_was_read_are_refused() -> None:
    packed = pack(8, seed=32)
    read_manifest(packed.manifest, packed.digest)
    with pytest.raises(AdapterCorrupt, match="hashes to"):
        read_manifest(packed.manifest[:-1] + b" ", packed.digest)
