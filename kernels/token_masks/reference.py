"""forbid_tokens, the definition. It serves GPUs, too."""

from __future__ import annotations

import torch

# What the logit of a token that is not allowed becomes. Finite: the check for logits that are not finite stays, and a
# row is left with a distribution where a bias bans every token that is allowed. float16 cannot hold it.
LOWEST = -1e30


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """See the package. Nothing waits for a GPU."""
    is_every_row = len(rows) == len(logits)
    own = logits if is_every_row else logits[rows]
    finite = own.isfinite().all(dim=-1)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (forbidden.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[1]].bool()
    own.masked_fill_(bits, LOWEST)
    if not is_every_row:
        logits[rows] = own
    return finite
