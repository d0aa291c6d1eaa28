"""Places are moved where they become values, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from data_plane.models.moved_places import MovedPlaces

NUM_TOKENS = 7
SHIFT = 1000
X = torch.arange(NUM_TOKENS * 3.0).view(NUM_TOKENS, 3)


def places() -> torch.Tensor:
    return torch.arange(NUM_TOKENS)


def written(target: torch.Tensor) -> torch.Tensor:
    target.copy_(places())
    return target


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: places().float(), torch.arange(7.0) + SHIFT),
        (lambda: torch.arange(NUM_TOKENS, dtype=torch.float32), torch.arange(7.0) + SHIFT),
        (
            lambda: (torch.ones(1, NUM_TOKENS, dtype=torch.int64).cumsum(-1) - 1) / 2,
            (torch.arange(7) + SHIFT)[None] / 2,
        ),
        (
            lambda: places()[None, :, None].expand(2, -1, 1) * 0.5,
            (torch.arange(7.0) + SHIFT)[None, :, None].repeat(2, 1, 1) / 2,
        ),
        (lambda: places() >= 5, torch.ones(7, dtype=torch.bool)),
        (lambda: written(torch.zeros(NUM_TOKENS)), torch.arange(7.0) + SHIFT),
        # However the count is made, and wherever it begins.
        (lambda: torch.tensor([float(place) for place in range(NUM_TOKENS)]) * 2, (torch.arange(7.0) + SHIFT) * 2),
        (lambda: torch.from_numpy(np.arange(NUM_TOKENS)) * 0.5, (torch.arange(7.0) + SHIFT) / 2),
        (lambda: torch.ones(NUM_TOKENS).cumsum(0), torch.arange(1.0, 8.0) + SHIFT),
        (lambda: torch.linspace(0, NUM_TOKENS - 1, NUM_TOKENS), torch.arange(7.0) + SHIFT),
        (lambda: torch.ones(NUM_TOKENS).nonzero()[:, 0] / 2, (torch.arange(7.0) + SHIFT) / 2),
        (lambda: torch.stack([places(), places()]).float(), (torch.arange(7.0) + SHIFT).repeat(2, 1)),
    ],
)
def test_a_value_made_of_places_is_moved(make: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    with MovedPlaces(NUM_TOKENS, SHIFT):
        value = make()
    assert torch.equal(value, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: X[places()],
        lambda: X.index_select(0, places().flip(0)),
        lambda: torch.nn.functional.embedding(places(), X),
        lambda: X.gather(0, places()[:, None]),
        lambda: torch.zeros(NUM_TOKENS, 3).index_add_(0, places(), X),
        lambda: torch.zeros(NUM_TOKENS, 3).scatter_(0, places()[:, None].expand(-1, 3), X),
        # Relative distances are the same wherever the batch begins.
        lambda: (places()[:, None] - places()[None]).float(),
        lambda: places()[:, None] >= places()[None],
        # Counts of something else.
        lambda: torch.arange(NUM_TOKENS + 1).float(),
        lambda: X.cumsum(0),
        lambda: torch.tensor([3, 1, 0, 2, 4, 6, 5]) * 0.5,
        lambda: X[torch.from_numpy(np.arange(NUM_TOKENS))],
        lambda: torch.linspace(0, 6, 7) - torch.arange(7.0),
        lambda: torch.full((places().max() + 1,), 2.0),  # type: ignore[arg-type]  # a size on the device, as models write it,
    ],
)
def test_places_that_only_choose_or_compare_tokens_stay(make: Callable[[], torch.Tensor]) -> None:
    expected = make()
    with MovedPlaces(NUM_TOKENS, SHIFT):
        value = make()
    assert torch.equal(value, expected)
