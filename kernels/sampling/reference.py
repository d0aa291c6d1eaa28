"""sample, the definition: Gumbel-max over the kept tokens, with noise from a counter-based hash.

    x      = the row's logits, adjusted (see Adjustments), as float32
    score  = (x - max x) / temperature, float64
    kept   = tokens of which fewer than top_k have a larger x;
             and of those, tokens with mass(larger x) < floor(top_p * mass(kept by top_k)), at least the likeliest;
             and of those, tokens with exp(score) >= min_p
    mass   = sum over tokens of exp(score) in units of 2^-40, each rounded to an integer
    noise  = -log(-log(u)), u = uniform(hash(seed, position, token id))
    token  = argmax over kept of score + noise, the lowest id among equals

so that equal logits are kept or dropped together. Order and meaning are those of transformers' processors:
temperature, top-k, top-p, min-p. Gumbel-max draws from the softmax of the scores of what is kept.

Devices agree on the tokens: integers may be summed in any order, the hash is SplitMix64 (Steele, Lea, Flood: Fast
splittable pseudorandom number generators, 2014) on wrapping int64, and scores are float64, so that a last-bit
difference of exp or log between devices decides about one draw in 10^11.
"""

from __future__ import annotations

import torch

from kernels.sampling.rows import IN_COMPLETION, Adjustments, SamplingRows

MASS_OF_ONE = 1 << 40  # 2^22 tokens of exp(score) = 1 still fit in int64
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_UNIT = 2.0**-52


def sample(logits: torch.Tensor, rows: SamplingRows | None, adjustments: Adjustments | None) -> torch.Tensor:
    """See the package. Greedy rows take the argmax; the others are drawn together."""
    adjusted = None if adjustments is None else adjust(logits, adjustments)
    tokens = logits.argmax(dim=-1)
    if adjustments is not None and adjusted is not None:
        tokens[adjustments.rows] = adjusted.argmax(dim=-1)
    if rows is None:
        return tokens
    drawn = rows.temperature.gt(0).nonzero().flatten()
    if drawn.numel() == 0:
        return tokens
    values = logits.index_select(0, drawn).float()
    if adjustments is not None and adjusted is not None:
        place = torch.full_like(tokens, -1)
        place[adjustments.rows] = torch.arange(len(adjusted), device=place.device)
        place = place[drawn]
        values[place >= 0] = adjusted[place[place >= 0]]
    tokens[drawn] = _draw(values, rows, drawn)
    return tokens


def processed(logits: torch.Tensor, rows: SamplingRows | None, adjustments: Adjustments | None) -> torch.Tensor:
    """What each row is drawn from, as finite float32 logits [n, vocab] of that distribution; see the package.

    The lowest float32 stands for tokens that are banned or not kept. Greedy rows have their adjusted logits.
    """
    values = logits.float() if logits.dtype != torch.float32 else logits.clone()
    if adjustments is not None:
        values[adjustments.rows] = adjust(logits, adjustments)
    if rows is not None:
        drawn = rows.temperature.gt(0).nonzero().flatten()
        values[drawn] = _kept_scores_of(values.index_select(0, drawn), rows, drawn).float()
    return values.clamp_(min=torch.finfo(torch.float32).min)


def adjust(logits: torch.Tensor, adjustments: Adjustments) -> torch.Tensor:
    """The adjusted logits of the m rows, float32 [m, vocab]; see Adjustments."""
    values = logits.index_select(0, adjustments.rows).float()
    values[adjustments.bias_row, adjustments.bias_token] += adjustments.bias
    penalised = adjustments.history_row.ge(0).nonzero().flatten()
    if penalised.numel() == 0:
        return values
    factors = (
        part[penalised].unsqueeze(1) for part in (adjustments.repetition, adjustments.presence, adjustments.frequency)
    )
    history = adjustments.history[adjustments.history_row[penalised]]
    values[penalised] = penalise(values[penalised], history, *factors)
    return values


def penalise(
    x: torch.Tensor, history: torch.Tensor, repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor
) -> torch.Tensor:
    """The penalties of Adjustments on float32 x, of tokens with this history (int32 of the same shape)."""
    x = torch.where(history > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    times = torch.div(history, IN_COMPLETION, rounding_mode="floor")
    x = x - frequency * times.float()
    return x - presence * times.gt(0).float()


def _draw(values: torch.Tensor, rows: SamplingRows, drawn: torch.Tensor) -> torch.Tensor:
    """Tokens of float32 values [len(drawn), vocab] by the settings of the rows `drawn`, none of them greedy."""
    seed, position = rows.seed.index_select(0, drawn), rows.position.index_select(0, drawn)
    scores = _kept_scores_of(values, rows, drawn)
    scores += gumbel(seed, position, torch.arange(values.shape[1], device=values.device))
    return scores.argmax(dim=-1)


def _kept_scores_of(values: torch.Tensor, rows: SamplingRows, drawn: torch.Tensor) -> torch.Tensor:
    """kept_scores by the settings of the rows `drawn`."""
    settings = (getattr(rows, name).index_select(0, drawn) for name in ("temperature", "top_k", "top_p", "min_p"))
    return kept_scores(values, *settings)


def kept_scores(
    values: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Scores of what is kept, float64 [n, vocab], -inf for the rest; all temperatures are above 0."""
    divisor = temperature.double().unsqueeze(1)
    scores = scaled_scores(values, divisor, values.amax(dim=-1, keepdim=True))
    lowest = _lowest_kept(values, divisor, top_k, top_p)
    if lowest is not None:
        scores.masked_fill_(values < lowest.unsqueeze(1), float("-inf"))
    limited = min_p.gt(0).nonzero().flatten()
    if limited.numel() > 0:
        chosen = scores.index_select(0, limited)
        scores[limited] = chosen.masked_fill(chosen.exp() < min_p[limited].double().unsqueeze(1), float("-inf"))
    return scores


def gumbel(seed: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float64 [n, num_tokens], from (seed [n], position [n], token id) alone; all int64."""
    key = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    bits = _mix(key.unsqueeze(1) + ((token_ids + 1) * _GOLDEN).unsqueeze(0))
    uniform = _shift_right(bits, 12).double().add_(0.5).mul_(_UNIT)  # in (0, 1), both ends excluded
    return uniform.log_().neg_().log_().neg_()


def scaled_scores(values: torch.Tensor, divisor: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """(values - highest) / divisor in float64."""
    return (values.double() - highest.double()).div_(divisor)


def mass_of(scores: torch.Tensor) -> torch.Tensor:
    """exp(scores) in units of 2^-40, int64."""
    return scores.exp().mul_(MASS_OF_ONE).add_(0.5).to(torch.int64)


def _lowest_kept(
    values: torch.Tensor, divisor: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor | None:
    """The lowest value that top-k and top-p keep of each row, float32 [n], -inf for no limit; None if none has one."""
    vocab_size = values.shape[1]
    limited = ((top_p < 1) | ((top_k > 0) & (top_k < vocab_size))).nonzero().flatten()
    if limited.numel() == 0:
        return None
    lowest = torch.full_like(values[:, 0], float("-inf"))
    num_kept = top_k.index_select(0, limited)
    num_kept = torch.where(num_kept > 0, num_kept.clamp(max=vocab_size), vocab_size).unsqueeze(1)
    most = int(num_kept.max())
    chosen = values.index_select(0, limited)
    descending = chosen.topk(most, dim=-1).values if most < vocab_size else chosen.sort(dim=-1, descending=True).values
    ranks = torch.arange(most, device=values.device)
    mass = mass_of(scaled_scores(descending, divisor.index_select(0, limited), descending[:, :1]))
    mass = mass.masked_fill_(ranks >= num_kept, 0)
    # Tokens that equal the last one kept are kept too, and count.
    last = descending.gather(1, num_kept - 1)
    num_equal = (chosen >= last).sum(dim=-1, keepdim=True) - num_kept
    total = mass.sum(dim=-1, keepdim=True) + num_equal * mass.gather(1, num_kept - 1)
    nucleus = top_p.index_select(0, limited).double().unsqueeze(1)
    least = (nucleus * total.double()).to(torch.int64).clamp_(min=1)
    is_kept = ((mass.cumsum(dim=-1) - mass < least) | (nucleus >= 1)) & (ranks < num_kept)
    lowest[limited] = descending.gather(1, is_kept.sum(dim=-1, keepdim=True) - 1).squeeze(1)
    return lowest


def _mix(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on wrapping int64."""
    state = (state ^ _shift_right(state, 30)).mul_(_MIX_1)
    state = state.bitwise_xor_(_shift_right(state, 27)).mul_(_MIX_2)
    return state.bitwise_xor_(_shift_right(state, 31))


def _shift_right(state: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift: int64's own keeps the sign."""
    return (state >> count).bitwise_and_((1 << (64 - count)) - 1)
