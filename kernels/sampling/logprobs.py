"""Log-probabilities of tokens under the model: the log-softmax of the raw logits, before any adjustment or limit.

    logprob(t) = x[t] - log(sum over all tokens of exp(x)),  rank(t) = 1 + number of tokens with a larger logit

The most likely tokens are in descending order, the lower id first among equal logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.devices import runs_triton


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token per row and of the most likely tokens. On the logits' device."""

    logprob: torch.Tensor  # float32 [n], natural logarithm, <= 0
    rank: torch.Tensor  # int64 [n], from 1; tokens of equal logits share the better one
    top_token: torch.Tensor  # int64 [n, num_top]
    top_logprob: torch.Tensor  # float32 [n, num_top]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TokenLogprobs:
    """Log-probabilities of token_ids, int64 [n], and of the num_top most likely, under logits [n, vocab]."""
    if logits.dim() != 2 or not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"logits is {tuple(logits.shape)} and num_top is {num_top}, want [rows, vocabulary] and less")
    if token_ids.dtype != torch.int64 or token_ids.shape != logits.shape[:1] or token_ids.device != logits.device:
        raise ValueError(
            f"token_ids is {token_ids.dtype} {tuple(token_ids.shape)} on {token_ids.device}, "
            f"want torch.int64 [{logits.shape[0]}] on {logits.device}"
        )
    if runs_triton(logits):
        from kernels.sampling.triton_logprobs import normalise as normalise_on_gpu

        normaliser, rank = normalise_on_gpu(logits, token_ids)
    else:
        normaliser, rank = normalise(logits, token_ids)
    chosen = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).float()
    top_token = most_likely(logits, num_top)
    top = logits.gather(1, top_token).float()
    return TokenLogprobs(chosen - normaliser, rank, top_token, top - normaliser.unsqueeze(1))


def normalise(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log(sum of exp), float32 [n], and the tokens' ranks, int64 [n]: the definition."""
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    return logits.float().logsumexp(dim=-1), (logits > chosen).sum(dim=-1) + 1


def most_likely(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """The num_top most likely tokens, int64 [n, num_top], by keys that no two tokens share: any device orders alike."""
    if num_top == 0:
        return logits.new_empty((logits.shape[0], 0), dtype=torch.int64)
    bits = (logits.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) + (0xFFFFFFFF - token_ids)
    return 0xFFFFFFFF - (keys.topk(num_top, dim=-1).values & 0xFFFFFFFF)
