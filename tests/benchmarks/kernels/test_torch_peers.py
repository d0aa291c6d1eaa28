"""torch's peers compute what our ops compute: otherwise their times would compare nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels import torch_peers, works_attention, works_lora
from benchmarks.kernels.work import Model

CPU = torch.device("cpu")
TINY = Model(256, 64, 4, 2, 16, 32)


def attend(query: Any, key: Any, value: Any, starts: Any, key_starts: Any, *, is_causal: bool) -> torch.Tensor:
    """Ragged attention of tokens [T, H, D] by SDPA, sequence by sequence; bottom right where it is causal."""
    parts = []
    for index in range(len(starts) - 1):
        rows = query[starts[index] : starts[index + 1]].transpose(0, 1)
        keys, values = (x[key_starts[index] : key_starts[index + 1]].transpose(0, 1) for x in (key, value))
        parts.append(scaled_dot_product_attention(rows, keys, values, is_causal=is_causal, enable_gqa=True))
    return torch.cat(parts, dim=1).transpose(0, 1)


def varlen_of_2_10(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool = False
) -> torch.Tensor:
    assert key.shape[1] == query.shape[1], "this version shares no heads"
    return attend(query, key, value, cu_seq_q, cu_seq_k, is_causal=is_causal)


def varlen_of_2_13(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    assert enable_gqa
    return attend(query, key, value, cu_seq_q, cu_seq_k, is_causal=window_size == (-1, 0))


@pytest.mark.parametrize("function", [varlen_of_2_10, varlen_of_2_13])
@pytest.mark.parametrize("is_causal", [False, True])
def test_varlen_attn_is_called_as_each_version_wants(
    monkeypatch: pytest.MonkeyPatch, function: Any, *, is_causal: bool
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", function)
    query = torch.randn(24, 4, 8)
    dense = [torch.randn(3, 2, 8, 8) for _ in range(2)]
    starts, lengths = [0, 8, 16, 24], [8, 8, 8]
    call = torch_peers.varlen_call(query, dense, starts, lengths, is_causal=is_causal)
    rows = query.view(3, 8, 4, 8).transpose(1, 2)
    expected = scaled_dot_product_attention(rows, dense[0], dense[1], is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(call(), expected.transpose(1, 2).reshape(24, 4, 8))


def test_varlen_attn_of_this_torch_has_the_parameters_that_are_used() -> None:
    names = set(inspect.signature(varlen.varlen_attn).parameters)
    assert {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"} <= names
    assert names & {"window_size", "is_causal"}


@torch.inference_mode()
def test_dense_attention_returns_the_same_as_ours_over_pages() -> None:
    rows = [
        works_attention.decode_work(TINY, 3, 40, CPU, torch.float32, is_compiled=False),
        works_attention.prefill_work(TINY, 24, 0, CPU, torch.float32, is_compiled=False),
        works_attention.cross_work(TINY, 2, 5, 33, CPU, torch.float32),
        works_attention.encoder_work(TINY, 2, 17, CPU, torch.float32),
    ]
    for work in rows:
        made = work.make()
        ours, theirs = made.ours(), made.peers["SDPA, contiguous"]()
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        torch.testing.assert_close(theirs.transpose(1, 2).reshape(ours.shape), ours, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_grouped_products_are_those_of_the_adapters_without_their_scaling() -> None:
    """bfloat16, which _grouped_mm requires; 5 tokens of 3 adapters, one with a single token. Scalings are in b."""
    x, y = torch.randn(5, 32).bfloat16(), torch.randn(5, 16).bfloat16()
    a, b = torch.randn(3, 32, 8).bfloat16() / 6, torch.randn(3, 8, 16).bfloat16() / 3
    before = y.clone()
    returned: Any = torch_peers.grouped_products(x, y, a, b, [2, 3, 5])["two _grouped_mm"]()
    for token, adapter in enumerate([0, 0, 1, 2, 2]):
        expected = y[token].float() + x[token].float() @ a[adapter].float() @ b[adapter].float()
        torch.testing.assert_close(returned[token].float(), expected, rtol=3e-2, atol=3e-2)
    assert torch.equal(y, before)


def test_the_groups_of_a_lora_row_end_where_its_tokens_do() -> None:
    made = works_lora.module_work(256, 3, 8, 7, CPU, torch.bfloat16).make()
    assert made.arguments["token_slots"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    returned: Any = made.peers["two _grouped_mm"]()
    x, y, a, b = (made.arguments[name].float() for name in ("x", "y", "a", "b"))
    expected = y[6] + x[6] @ a[2].T @ b[2] * made.arguments["scaling"][2]
    torch.testing.assert_close(returned[6].float(), expected, rtol=3e-2, atol=3e-2)


@torch.inference_mode()
def test_batched_products_are_ours_over_unequal_modules() -> None:
    """Those of a group whose modules have unequal widths; y itself is left alone."""
    made = works_lora.group_work(TINY, 3, 8, 6, CPU, torch.float32).make()
    y, x, scaling = (made.arguments[name] for name in ("y", "x", "scaling"))
    a, b = made.arguments["a"], made.arguments["b"]
    before = y.clone()
    call: Any = torch_peers.batched_products(x, y, a, b, scaling)["bmm"]
    call()
    sums = inspect.getclosurevars(call).nonlocals["sums"].view_as(y)
    assert torch.equal(y, before)
    made.ours()
    assert not torch.equal(y, before)
    torch.testing.assert_close(sums, y, rtol=1e-4, atol=1e-4)
    assert torch_peers.batched_products(x[:5], y[:5], a, b, scaling) == {}, (
        "5 tokens of 3 adapters are not as many each"
    )
