"""Rows of decode steps for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.row_state import DraftTokens, RowState


@dataclass(frozen=True, slots=True)
class Case:
    """One step."""

    name: str
    num_rows: int  # of the state
    rows: tuple[int, ...]
    block_size: int = 16
    max_blocks: int = 9


CASES = (
    Case("no row", 4, ()),
    Case("one row", 4, (2,)),
    Case("every row, backwards", 6, (5, 4, 3, 2, 1, 0), block_size=4),
    Case("padded", 8, (1, 6, -1, 0, -1, -1)),
    Case("nothing but padding", 3, (-1, -1)),
    Case("more than one program", 300, tuple(range(0, 300, 2)), block_size=3, max_blocks=17),
)


def no_drafts(rows: torch.Tensor) -> DraftTokens:
    """Of a step of these rows without drafts."""
    return DraftTokens(torch.full_like(rows, -1), torch.full_like(rows, 7))


def make(case: Case, *, device: torch.device | str = "cpu", seed: int = 0) -> tuple[RowState, torch.Tensor]:
    """A state whose rows all have room for a token, and the step's rows int32 [n]."""
    generator = torch.Generator().manual_seed(seed)
    count, room = case.num_rows, case.block_size * case.max_blocks

    def below(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    state = RowState(
        below(1 << 40, count).to(device),
        below(room, count).int().to(device),
        (1 + below(room, count)).int().to(device),
        (below(9, count) - 1).int().to(device),
        below(1 << 20, count, case.max_blocks).int().to(device),
    )
    return state, torch.tensor(case.rows, dtype=torch.int32, device=device)
