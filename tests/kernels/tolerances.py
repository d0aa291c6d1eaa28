"""How far a kernel may be from its reference, by dtype. One table for all ops.

float32:  sums of up to a few thousand products in another order: about sqrt(n) roundings of 2^-24.
bfloat16: the result is rounded to 8 bits (2^-9 relative), and one or two values on the way are too
          (attention weights, the shrunk activation, the base output before the adapter is added).
float16:  as bfloat16 with 11 bits.
"""

from __future__ import annotations

import torch

# dtype -> (relative, absolute for values of order 1)
TOLERANCES = {
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (3e-3, 3e-3),
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, magnitude: float = 1.0) -> None:
    """Compare in the table's tolerance of the actual dtype; `magnitude` is the size of the sums on the way."""
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol * magnitude)
