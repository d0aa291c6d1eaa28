"""gated_activation's GPU kernel against its definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.gated_activation import ACTIVATIONS, reference, triton_kernel
from kernels.gated_activation.cases import CASES, Case, make
from tests.kernels.tolerances import assert_close

# NumPy's, of the interpreter: 1 / (1 + inf) is meant.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def check(case: Case, activation: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
    x = make(case, dtype, seed=seed)
    there = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device).copy_(x)
    actual = triton_kernel.gated_activation(there, activation)
    assert_close(actual.cpu(), reference.gated_activation(x, activation), magnitude=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_equals_the_reference(case: Case, activation: str, dtype: torch.dtype, device: torch.device) -> None:
    check(case, activation, dtype, device)


@settings(max_examples=6)
@given(st.integers(1, 4), st.integers(1, 1500), st.booleans(), st.sampled_from(ACTIVATIONS))
def test_random_shapes_equal_the_reference(num_tokens: int, width: int, is_strided: bool, activation: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(Case("random", num_tokens, width, is_strided), activation, torch.float32, device, width)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saturated_gates_are_exact(activation: str, device: torch.device) -> None:
    """A gate of 64 passes up whole, one of -64 and one of 0 pass nothing: bit for bit, over two chunks."""
    width = triton_kernel.BLOCK + 3
    gate = torch.tensor([64.0, 0.0, -64.0]).repeat(width)[:width]
    up = torch.arange(float(width))
    x = torch.cat([gate, up]).expand(2, -1).contiguous().to(device)
    actual = triton_kernel.gated_activation(x, activation).cpu()
    assert torch.equal(actual[:, 0::3], (64 * up[0::3]).expand(2, -1))
    assert torch.equal(actual[:, 1::3], torch.zeros_like(actual[:, 1::3]))
    assert actual[:, 2::3].abs().max() < 1e-20


def test_every_value_of_the_result_is_written(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into memory full of NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    x = torch.ones(2, 2 * (triton_kernel.BLOCK + 5), device=device)
    assert triton_kernel.gated_activation(x, "silu").isfinite().all()


def test_a_row_past_2_to_the_31_values_is_found(device: torch.device) -> None:
    """Its offset needs 64 bits, the stride does not. Of the 4 GiB only the pages of three rows are ever touched."""
    far = torch.empty((1 << 31) + 16, dtype=torch.float16, device=device).as_strided((3, 16), (1 << 30, 1))
    far.copy_(torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 16))
    near = far.contiguous()
    assert torch.equal(triton_kernel.gated_activation(far, "silu"), triton_kernel.gated_activation(near, "silu"))
