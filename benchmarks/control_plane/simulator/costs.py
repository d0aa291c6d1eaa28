"""How long a simulated worker takes: a model of bytes and products, not a measurement.

A step reads the weights once, the KV of its decoding rows, the weights of its distinct adapters, and computes its
tokens: the sum of bytes over the bandwidth plus prefill tokens over the compute rate, plus a constant. The defaults are
an 8B model in bfloat16 with 8 KV heads on a GPU of 4 TB/s and 450 TFLOP/s, both assumed. It is the byte model of
the targets in benchmarks/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Rates of one worker and its links."""

    weight_bytes: float = 16e9
    kv_bytes_per_token: float = 131_072.0
    bytes_per_s: float = 4e12
    flops_per_token: float = 16e9
    flops_per_s: float = 450e12
    step_s: float = 0.5e-3  # launches and the host's part
    link_s: float = 0.2e-3  # one way between control plane and worker
    host_bytes_per_s: float = 50e9  # KV blocks to and from host memory
    load_bytes_per_s: float = 1.5e9  # adapter weights from the host cache
    load_s: float = 5e-3  # beside the bytes
    store_s: float = 50e-3  # more, where the host cache does not hold the adapter
    evict_s: float = 1e-3

    def step(self, *, prefill_tokens: int, context_tokens: int, adapter_bytes: int) -> float:
        """Seconds of one step; context_tokens are those that its decoding rows read."""
        read = self.weight_bytes + context_tokens * self.kv_bytes_per_token + adapter_bytes
        return self.step_s + read / self.bytes_per_s + prefill_tokens * self.flops_per_token / self.flops_per_s

    def move(self, num_tokens: int) -> float:
        """Seconds that the KV of so many tokens takes to host memory, or back. The step waits for it."""
        return num_tokens * self.kv_bytes_per_token / self.host_bytes_per_s

    def load(self, num_bytes: int, *, is_cached: bool) -> float:
        """Seconds from the command until the slot is ready."""
        return self.load_s + num_bytes / self.load_bytes_per_s + (0.0 if is_cached else self.store_s)
