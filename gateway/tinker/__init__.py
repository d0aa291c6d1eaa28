"""The sampling part of the Tinker protocol: `sample` and `compute_logprobs` over immutable versions of adapters."""
