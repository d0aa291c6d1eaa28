"""The lists of what decode and prefill compute, and what of a batch is uploaded."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention import AttentionBatch, RowBatch
from kernels.paged_attention.device_batch import Splitting, Work
from kernels.paged_attention.launch import DecodeLaunch
from kernels.paged_attention.triton_work import write_list


def work_of(batch: AttentionBatch | RowBatch, launch: DecodeLaunch, window: int | None = None) -> Work:
    """The work list of two tiles of heads, over blocks of 16."""
    on_device = batch.on_device(torch.device("cpu"), 16)
    splitting = Splitting(launch.split_keys, launch.max_splits, 2, launch.block_n, window)
    work = on_device.work(splitting, lambda work: write_list(work, on_device, splitting))
    assert work is not None
    assert on_device.work(splitting, lambda work: pytest.fail("a list is written twice")) is work
    return work


def listed(work: Work, lens: list[int]) -> list[tuple[int, int]]:
    """(sequence, split) of batches whose first sequences have one query each, and no other has."""
    entries = work.programs[: int(work.num_programs)].tolist()
    assert not work.num_done[[token for token, *_ in entries]].any()
    assert all(row == token and lens[token] == context_len for token, _, context_len, row in entries)
    return [(token, split) for token, split, *_ in entries]


def test_a_long_sequence_brings_programs_for_itself_alone() -> None:
    """At 512 keys a split and four splits at most; at most 700 + 63 keys of each are read in the last case."""
    lens = [1300, 40, 512, 9000, 768, 9]
    batch = AttentionBatch.build(torch.zeros(6, 600, dtype=torch.int32), [0, 1, 2, 3, 4, 5, 9], lens)
    launch = DecodeLaunch(16, 64, max_splits=4)
    work = work_of(batch, launch)
    several = [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1), (3, 2), (3, 3), (4, 0), (4, 1)]
    assert listed(work, lens) == [*several, (1, 0), (2, 0)]
    # Six splits more than sequences: a bucket of eight.
    assert (len(work.programs), work.num_parts) == (5 + 8, 5 + 8)
    work = work_of(batch, launch, 700)
    assert listed(work, lens) == [(sequence, 0) for sequence in range(5)]
    assert (len(work.programs), work.num_parts) == (5, 0)


def test_a_batch_without_single_queries_has_no_work() -> None:
    batch = AttentionBatch.build(torch.zeros(1, 9, dtype=torch.int32), [0, 5], [90])
    work = batch.on_device(torch.device("cpu"), 16).work(
        Splitting(512, 4, 2, 64, None), lambda work: pytest.fail("listed")
    )
    assert work is None


@pytest.mark.parametrize("num_seqs", [1, 300])
def test_every_split_is_listed_once(num_seqs: int) -> None:
    """More sequences than one load of the kernel takes."""
    generator = torch.Generator().manual_seed(num_seqs)
    lens = torch.randint(1, 3000, (num_seqs,), generator=generator).tolist()
    batch = AttentionBatch.build(torch.zeros(num_seqs, 200, dtype=torch.int32), range(num_seqs + 1), lens)
    work = work_of(batch, DecodeLaunch(16, 64))
    splits = [max((keys + 256) // 512, 1) for keys in lens]
    found = listed(work, lens)
    assert sorted(found) == [(sequence, split) for sequence in range(num_seqs) for split in range(splits[sequence])]
    assert all(splits[sequence] > 1 for sequence, _ in found[: sum(count for count in splits if count > 1)])
    assert sum(count for count in splits if count > 1) <= work.num_parts


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_every_upload_is_aligned_whatever_the_batch(num_seqs: int, width: int) -> None:
    """Triton compiles a kernel anew where a pointer is not a multiple of 16 bytes."""
    tables = torch.arange(num_seqs * width, dtype=torch.int32).view(num_seqs, width)
    batch = AttentionBatch.build(tables, range(num_seqs + 1), range(1, num_seqs + 1))
    there = batch.on_device(torch.device("cpu"), 16)
    work = there.work(Splitting(2, 64, 3, 16, None), lambda work: None)
    assert work is not None
    parts = [there.block_tables, there.table_rows, there.query_start, there.context_lens]
    parts += [work.programs, work.num_programs, work.num_done]
    assert [part.storage_offset() % 4 for part in parts] == [0] * len(parts)
    assert torch.equal(there.block_tables[:, :width], tables)
    assert there.block_tables.shape[1] == {1: 1, 2: 2, 3: 4, 7: 8}[width]
    assert there.query_start.tolist() == list(range(num_seqs + 1))
    assert there.context_lens.tolist() == list(range(1, num_seqs + 1))


def test_tiles_cover_every_query_once_and_the_longest_come_first() -> None:
    batch = AttentionBatch.build(torch.zeros(4, 10, dtype=torch.int32), [0, 5, 6, 6, 9], [5, 90, 3, 80])
    on_device = batch.on_device(torch.device("cpu"), 16)
    assert on_device.tiles(4).tolist() == [[3, 0], [0, 4], [0, 0]]
    assert batch.on_device(torch.device("cpu"), 16) is on_device
    with pytest.raises(ValueError, match="90 tokens need more than 10 blocks of 8"):
        batch.on_device(torch.device("cpu"), 8)
