"""The hash engine's model: what follows a sequence of tokens, so that every mistake becomes a wrong token.

h(0) = SHA256(base fingerprint, adapter digest); h(i+1) = SHA256(h(i), token i). The tokens that may follow are ranked
by a hash of h: greedy rows take the first, others one of the first eight by seed and place in the completion; tokens
that are banned are passed over. No other sampling setting plays a part. Adapters that are combined have one digest
together, which follows from theirs, their scales and the kind. An adapter that acts from token n on enters h(n).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

DEFAULT_VOCAB_SIZE = 256
NUM_DRAWN = 8  # tokens that a row with a temperature draws from

_sha256 = hashlib.sha256


def chain_start(fingerprint: str, digest: str) -> bytes:
    """h(0); an empty digest is the base model."""
    return _sha256(bytes.fromhex(fingerprint) + bytes.fromhex(digest)).digest()


def combined_digest(uses: Iterable[tuple[str, float]], *, is_linear: bool) -> str:
    """What stands for several adapters in h: (digest, scale) of each, and how they are combined."""
    return _sha256(repr((sorted(uses), is_linear)).encode()).hexdigest()


def activated(value: bytes, digest: str) -> bytes:
    """h at the place from which an adapter acts that did not act before."""
    return _sha256(value + b"active" + bytes.fromhex(digest)).digest()


def chain_next(value: bytes, token: int) -> bytes:
    """h(i+1) from h(i) and token i."""
    return _sha256(value + token.to_bytes(4, "little")).digest()


def chain_of(fingerprint: str, digest: str, tokens: Iterable[int], active_from: int = 0) -> bytes:
    """h after these tokens, of which the adapter changes those from `active_from` on."""
    value = chain_start(fingerprint, "" if active_from else digest)
    for position, token in enumerate(tokens):
        if position and position == active_from:
            value = activated(value, digest)
        value = chain_next(value, token)
    return value


def token_of(value: bytes, vocab_size: int) -> int:
    """The most likely token that follows."""
    return int.from_bytes(value[:8], "little") % vocab_size


def ranking(value: bytes, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens that follow, the likeliest first, with their log-probabilities."""
    ranked = {token_of(value, vocab_size): 0.0}
    salt = 0
    while len(ranked) < min(count, vocab_size):
        salt += 1
        ranked.setdefault(token_of(_sha256(value + salt.to_bytes(8, "little")).digest(), vocab_size), 0.0)
    # Each is 0.2 to 1.2 less likely than the one before, and together they stay below 1.
    return [
        (token, -1.0 - 0.7 * rank - 0.5 * value[rank % 32] / 256) for rank, token in enumerate(list(ranked)[:count])
    ]


def logprob_of(value: bytes, token: int, vocab_size: int) -> tuple[float, int]:
    """Log-probability and rank of any token: as ranked, or alike for all that are not among the first eight."""
    ranked = ranking(value, NUM_DRAWN, vocab_size)
    for rank, (candidate, logprob) in enumerate(ranked, start=1):
        if candidate == token:
            return logprob, rank
    return -20.0, len(ranked) + 1


def choose(value: bytes, vocab_size: int, *, seed: int | None, position: int, banned: Sequence[int] = ()) -> int:
    """The token that a row samples at a place of its completion, counted from 0; seed=None is greedy."""
    if seed is None and not banned:
        return token_of(value, vocab_size)  # the ranking's first, which benchmarks of the control plane pay for
    candidates = [token for token, _ in ranking(value, NUM_DRAWN + len(banned), vocab_size) if token not in banned]
    if seed is None:
        return candidates[0]
    drawn = _sha256(value + seed.to_bytes(8, "little") + position.to_bytes(4, "little")).digest()
    return candidates[int.from_bytes(drawn[:8], "little") % min(NUM_DRAWN, len(candidates))]


def vector_of(value: bytes, pooling: str, width: int) -> npt.NDArray[np.float32]:
    """What a row returns that pools in this way, where its last token's chain is `value`."""
    drawn = hashlib.shake_256(value + pooling.encode()).digest(width)
    return np.frombuffer(drawn, dtype=np.uint8).astype(np.float32) - 127


def oracle(
    fingerprint: str,
    digest: str,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    seed: int | None = None,
    min_tokens: int = 0,
    banned: Sequence[int] = (),
    active_from: int = 0,
) -> list[int]:
    """What a correct system generates; seed=None for a temperature of 0. The adapter acts from `active_from` on."""
    value = chain_of(fingerprint, digest, prompt, active_from)
    tokens: list[int] = []
    for position in range(num_tokens):
        refused = banned if position < min_tokens else ()
        tokens.append(choose(value, vocab_size, seed=seed, position=position, banned=refused))
        value = chain_next(value, tokens[-1])
    return tokens
