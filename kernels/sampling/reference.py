"""sample, the definition: Gumbel-max over the kept tokens, with noise from a counter-based hash.

    kept   = tokens whose logit is at least the k-th largest, and at least that of the token with which the sum of
             the k largest tokens' probabilities (descending) reaches top_p; equal logits are kept or dropped together
    noise  = -log(-log(u)), u = uniform(hash(seed, position, token id))
    token  = argmax over kept of logit / temperature + noise

Gumbel-max draws from softmax(logit / temperature) over the kept tokens. The hash is SplitMix64 (Steele, Lea, Flood:
Fast splittable pseudorandom number generators, 2014) on wrapping int64, so that every device computes the same bits;
scores are float64, so that a last-bit difference of `log` between devices decides about one draw in 10^12.
"""

from __future__ import annotations

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_UNIT = 2.0**-53


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """See the package. Greedy rows take the argmax; the others are drawn together."""
    tokens = logits.argmax(dim=-1)
    drawn = temperature.gt(0).nonzero().flatten()
    if drawn.numel() == 0:
        return tokens
    values = logits.index_select(0, drawn).float()
    divisor = temperature.index_select(0, drawn).double().unsqueeze(1)
    lowest = _lowest_kept(values, divisor, top_k.index_select(0, drawn), top_p.index_select(0, drawn))
    scores = _scores(values, divisor, values.amax(dim=-1, keepdim=True))
    scores.masked_fill_(values < lowest.unsqueeze(1), float("-inf"))
    scores += gumbel(seed.index_select(0, drawn), position.index_select(0, drawn), logits.shape[1])
    tokens[drawn] = scores.argmax(dim=-1)
    return tokens


def gumbel(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise, float64 [n, vocab_size], from (seed, position, token id) alone."""
    key = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    token_ids = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=seed.device)
    bits = _mix(key.unsqueeze(1) + (token_ids * _GOLDEN).unsqueeze(0))
    uniform = _shift_right(bits, 11).double().add_(0.5).mul_(_UNIT)  # in (0, 1), both ends excluded
    return uniform.log_().neg_().log_().neg_()


def _scores(values: torch.Tensor, divisor: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """(values - highest) / divisor in float64."""
    return (values.double() - highest.double()).div_(divisor)


def _lowest_kept(values: torch.Tensor, divisor: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The lowest logit that each row keeps, float32 [n]. Rows without limits keep all: -inf."""
    vocab_size = values.shape[1]
    lowest = torch.full_like(values[:, 0], float("-inf"))
    limited = ((top_p < 1) | ((top_k > 0) & (top_k < vocab_size))).nonzero().flatten()
    if limited.numel() == 0:
        return lowest
    num_kept = top_k.index_select(0, limited)
    num_kept = torch.where(num_kept > 0, num_kept.clamp(max=vocab_size), vocab_size)
    most = int(num_kept.max())
    chosen = values.index_select(0, limited)
    descending = chosen.topk(most, dim=-1).values if most < vocab_size else chosen.sort(dim=-1, descending=True).values
    scores = _scores(descending, divisor.index_select(0, limited), descending[:, :1])
    ranks = torch.arange(most, device=values.device)
    scores = scores.masked_fill_(ranks >= num_kept.unsqueeze(1), float("-inf"))
    # Token j is needed while the sum before it is below top_p; the first always is.
    probabilities = scores.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    nucleus = top_p.index_select(0, limited).double().unsqueeze(1)
    is_kept = (before < nucleus) | (nucleus >= 1)
    num_kept = torch.minimum(is_kept.sum(dim=-1).clamp(min=1), num_kept)
    lowest[limited] = descending.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1)
    return lowest


def _mix(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on wrapping int64."""
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(state: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift: int64's own keeps the sign."""
    return (state >> count) & ((1 << (64 - count)) - 1)
