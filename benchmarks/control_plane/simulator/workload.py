"""Requests of a simulated day, from a seed: who sends when, with which adapter, how much.

Arrivals are a Poisson process; adapters follow a Zipf law; lengths are log-normal, cut at both ends. Requests of one
adapter begin with the same tokens, as a system prompt does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from control_plane.scheduler.types import AdapterRef, Request, RequestId

_CHUNK = 65_536  # requests drawn at once
_SUFFIX_VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """How much one tenant requests."""

    name: str
    share: float  # of the requests, no unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the fleet gets."""

    num_requests: int
    num_adapters: int
    requests_per_s: float
    zipf_exponent: float = 1.0  # popularity of the k-th adapter is k ** -exponent
    prompt_tokens: tuple[int, int] = (16, 1024)  # least and most
    prompt_median: int = 96
    output_tokens: tuple[int, int] = (1, 512)
    output_median: int = 32
    sigma: float = 0.8  # of the logarithm of both lengths
    prefix_tokens: int = 32  # that all requests of an adapter share
    long_share: float = 0.0  # of the requests whose prompt has long_tokens
    long_tokens: int = 4096
    group_share: float = 0.0  # of the requests with group_size completions
    group_size: int = 4
    adapter_bytes: tuple[int, ...] = (42 << 20, 84 << 20, 168 << 20)  # by rank, in turn over the adapters
    tenants: tuple[TenantLoad, ...] = (TenantLoad("default", 1.0),)
    seed: int = 1

    def adapter(self, idx: int) -> AdapterRef:
        """The idx-th adapter, the most popular first."""
        digest = hashlib.sha256(b"adapter %d" % idx).hexdigest()
        return AdapterRef(digest, self.adapter_bytes[idx % len(self.adapter_bytes)])

    def requests(self) -> Iterator[Request]:
        """All of them in order of arrival."""
        rng = np.random.default_rng(self.seed)
        popularity = np.arange(1, self.num_adapters + 1, dtype=np.float64) ** -self.zipf_exponent
        cumulated = np.cumsum(popularity / popularity.sum())
        shares = np.cumsum([tenant.share for tenant in self.tenants])
        refs: dict[int, AdapterRef] = {}
        now_s, request_id = 0.0, 0
        while request_id < self.num_requests:
            count = min(_CHUNK, self.num_requests - request_id)
            arrivals = now_s + np.cumsum(rng.exponential(1 / self.requests_per_s, count))
            now_s = float(arrivals[-1])
            adapters = np.minimum(np.searchsorted(cumulated, rng.random(count)), self.num_adapters - 1).tolist()
            tenants = np.minimum(np.searchsorted(shares, rng.random(count) * shares[-1]), len(shares) - 1).tolist()
            prompts = _lengths(rng, count, self.prompt_median, self.sigma, self.prompt_tokens)
            prompts[rng.random(count) < self.long_share] = self.long_tokens
            outputs = _lengths(rng, count, self.output_median, self.sigma, self.output_tokens).tolist()
            completions = [1] * count
            if self.group_share:
                completions = np.where(rng.random(count) < self.group_share, self.group_size, 1).tolist()
            for arrival_s, adapter_idx, tenant, num_prompt, num_output, num_completions in zip(
                arrivals.tolist(), adapters, tenants, prompts.tolist(), outputs, completions, strict=True
            ):
                request_id += 1
                ref = refs.get(adapter_idx)
                if ref is None:
                    ref = refs[adapter_idx] = self.adapter(adapter_idx)
                shared = min(self.prefix_tokens, num_prompt - 1)
                suffix = rng.integers(0, _SUFFIX_VOCABULARY, num_prompt - shared).tolist()
                yield Request(
                    request_id=RequestId(request_id),
                    prompt_token_ids=(*range(shared), *suffix),
                    max_tokens=num_output,
                    adapter=ref,
                    arrival_s=arrival_s,
                    tenant=self.tenants[tenant].name,
                    num_samples=num_completions,
                )


def _lengths(
    rng: np.random.Generator, count: int, median: int, sigma: float, limits: tuple[int, int]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    drawn = np.exp(rng.normal(np.log(median), sigma, count))
    return np.clip(np.rint(drawn), *limits).astype(np.int64)
