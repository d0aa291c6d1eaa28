"""row_state, the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.row_state import DecodeInputs, DraftTokens, RowState


def decode_inputs(state: RowState, rows: torch.Tensor, block_size: int, drafts: DraftTokens) -> DecodeInputs:
    """See the package."""
    from kernels.row_state import DecodeInputs

    is_row = rows >= 0
    ids = rows.long().clamp(min=0)
    ahead = drafts.ahead
    token_ids = torch.where(ahead > 0, drafts.token_ids.long(), state.last_tokens[ids])
    computed = torch.where(is_row, state.num_computed[ids] + ahead.clamp(min=0), 0)
    positions = computed.long()
    blocks = state.block_tables[ids, positions // block_size].long()
    inputs = DecodeInputs(
        torch.where(is_row, token_ids, 0),
        positions,
        torch.where(is_row, blocks * block_size + positions % block_size, -1),
        torch.where(is_row, computed + 1, 0).int(),
        torch.where(is_row, positions + 1 - state.num_prompt[ids], 0),
        torch.where(is_row, state.slots[ids], -1),
    )
    # Padding adds nothing to row 0. index_add_ adds for each of several equal indices.
    state.num_computed.index_add_(0, ids, (is_row & (ahead < 0)).int())
    return inputs


def store_tokens(last_tokens: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """See the package."""
    ids = rows.long()
    # What belongs to no row goes after the last one.
    wide = torch.cat([last_tokens, last_tokens.new_zeros(1)])
    wide[torch.where(ids >= 0, ids, len(last_tokens))] = tokens
    last_tokens.copy_(wide[:-1])


def store_differences(whole: torch.Tensor, differences: torch.Tensor) -> None:
    """See the package."""
    places, values = differences.chunk(2)
    whole.index_copy_(0, places.long(), values)
