"""kernels.sampling.token_logprobs: the log-softmax of the raw logits, ranks, and the most likely tokens in order."""

from __future__ import annotations

import pytest
import torch

from kernels.sampling import token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 1001])
def test_logprobs_are_the_log_softmax(vocab_size: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    tokens = torch.arange(6) * 7 % vocab_size
    num_top = min(vocab_size, 3)
    expected = logits.double().log_softmax(-1)
    actual = token_logprobs(logits, tokens, num_top)
    torch.testing.assert_close(actual.logprob, expected[range(6), tokens].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.top_logprob, expected.topk(num_top).values.float(), rtol=1e-5, atol=1e-5)
    assert actual.rank.tolist() == [
        int((row > row[token]).sum()) + 1 for row, token in zip(logits, tokens, strict=True)
    ]


def test_equal_logits_are_ordered_by_token_and_share_a_rank() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, -5.0, 0.0], [-1.0] * 6])
    actual = token_logprobs(logits, torch.tensor([2, 5]), 6)
    assert actual.top_token.tolist() == [[1, 3, 0, 2, 5, 4], [0, 1, 2, 3, 4, 5]]
    assert actual.rank.tolist() == [3, 1]


def test_nothing_but_the_token_may_be_requested() -> None:
    actual = token_logprobs(torch.zeros(2, 4), torch.tensor([0, 3]), 0)
    assert actual.top_token.shape == actual.top_logprob.shape == (2, 0)
    assert token_logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 2).logprob.shape == (0,)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="num_top is 5"):
        token_logprobs(torch.zeros(1, 4), torch.tensor([0]), 5)
    with pytest.raises(ValueError, match=r"token_ids is torch.int64 \(2,\)"):
        token_logprobs(torch.zeros(1, 4), torch.tensor([0, 1]), 0)
