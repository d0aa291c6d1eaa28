"""The form of a linear's weight that is fastest: the rule, and that every form computes the same."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import choice
from kernels.linear.choice import Form, fastest_form, form_times_us
from kernels.linear.onednn import onednn_linear, to_onednn
from kernels.native.measured import Measurements, Results

ROWS = (*choice.DECODE_ROWS, *choice.PREFILL_ROWS)


def results_of(**times: tuple[float, ...]) -> Results:
    return {form: dict(zip(map(str, ROWS), us, strict=True)) for form, us in times.items()}


@pytest.mark.parametrize(
    ("times", "form"),
    [
        ({"plain": (9, 9, 9, 9, 9), "native": (5, 5, 5, 5, 5), "onednn": (6, 6, 6, 6, 6)}, Form.NATIVE),
        # Twice as fast at one row makes up for half as fast at 512, whatever those take.
        ({"native": (1, 9, 9, 9, 8000), "onednn": (2.1, 9, 9, 9, 4000)}, Form.NATIVE),
        ({"native": (1, 9, 9, 9, 8000), "onednn": (1.9, 9, 9, 9, 4000)}, Form.ONEDNN),
        ({"plain": (1, 1, 1, 1, 1)}, Form.PLAIN),
    ],
)
def test_the_product_of_the_times_decides(
    times: dict[str, tuple[float, ...]], form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "measured", lambda name, key, measure: results_of(**times))
    assert fastest_form(2816, 1024, torch.bfloat16) is form


def test_sizes_share_their_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def measured(name: str, key: str, measure: object) -> Results:
        requested.append(key)
        return results_of(plain=(1, 1, 1, 1, 1))

    monkeypatch.setattr(choice, "measured", measured)
    for sizes in ((1024, 1024), (32000, 4096), (1024, 2816), (256, 512), (64, 64)):
        fastest_form(*sizes, torch.bfloat16)
    fastest_form(64, 64, torch.float32)
    assert requested == ["bfloat16 1024x1024"] * 3 + ["bfloat16 256x256"] * 2 + ["float32 256x256"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_this_machine_s_forms_are_measured_at_all_row_counts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "measured", Measurements(None, {}).get)
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    times = form_times_us(64, 64, dtype)
    assert {Form.NATIVE, Form.PLAIN} <= times.keys()
    assert (Form.ONEDNN in times) == (to_onednn(torch.zeros(2, 2, dtype=dtype)) is not None)
    for of_form in times.values():
        assert tuple(of_form) == ROWS
        assert all(us > 0 for us in of_form.values())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_forms_compute_the_same(dtype: torch.dtype) -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        copies = choice.copies_by_form(weight, 2)
        outputs = [choice.product_in(form, x, one, 96)() for form in copies for one in copies[form]]
    expected = torch.nn.functional.linear(x.double(), weight.double())
    for output in outputs:
        torch.testing.assert_close(output.double(), expected, atol=0.3, rtol=0.02)


def test_onednn_s_layout_takes_a_bias_and_any_leading_sizes() -> None:
    weight, bias, x = torch.randn(6, 4), torch.randn(6), torch.randn(2, 3, 4)
    packed = to_onednn(weight)
    assert packed is not None
    torch.testing.assert_close(onednn_linear(x, packed, bias), torch.nn.functional.linear(x, weight, bias))
