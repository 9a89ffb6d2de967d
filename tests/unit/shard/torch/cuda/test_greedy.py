"""The greedy sampling kernel, compared with the formula in float64."""

from __future__ import annotations

import pytest
import torch
from reference_kernels import greedy
from torch import Tensor

from text_generation_shard.engines.torch.kernels import greedy as kernel
from text_generation_shard.engines.torch.kernels.greedy import GreedySampler

# The interpreter warns about infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
VOCAB_SIZE = 5000
"""More than one segment of logits, and not a multiple of a segment."""


def run_sampler(logits: Tensor, slots: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, log-probabilities and the last tokens of the slots."""
    rows, device = len(logits), logits.device
    last_tokens = torch.full((rows,), -7, dtype=torch.int32, device=device)
    token_ids = torch.full_like(last_tokens, -8)
    logprobs = torch.full((rows,), torch.nan, device=device)
    slots = list(range(rows)) if slots is None else slots
    choice = GreedySampler(rows, logits.shape[1], device)
    for _ in range(2):  # the second run uses the workspace of the first
        choice.run(logits, torch.tensor(slots, dtype=torch.int32, device=device), last_tokens, token_ids, logprobs)
    return token_ids, logprobs, last_tokens


@pytest.mark.parametrize("many_programs", [kernel.MANY_PROGRAMS, 12], ids=["few rows", "many rows, longer segments"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [3, 1024, VOCAB_SIZE])
def test_the_most_probable_token_and_its_logprob(
    vocab_size: int, dtype: torch.dtype, many_programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "MANY_PROGRAMS", many_programs)
    wide = torch.full((5, vocab_size + 100), torch.inf, device=device, dtype=dtype)
    logits = wide[:, :vocab_size]  # strided
    logits.copy_(5 * torch.randn(5, vocab_size))
    tokens, expected = greedy(logits.double())
    token_ids, logprobs, last_tokens = run_sampler(logits, slots=[2, 0, 3, 1, 4])
    assert token_ids.tolist() == tokens.tolist()
    assert last_tokens[[2, 0, 3, 1, 4]].tolist() == tokens.tolist()
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_first_of_equal_logits_is_sampled(device: torch.device) -> None:
    logits = torch.randn(3, VOCAB_SIZE, device=device)
    for row, columns in enumerate([[1500, 1501], [100, 4999], [1023, 1024, 3000]]):
        logits[row, columns] = 9.0
    assert run_sampler(logits)[0].tolist() == [1500, 100, 1023]


def test_masked_tokens_are_not_sampled(device: torch.device) -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf, device=device)
    logits[0, [3000, 3001]] = torch.tensor([-50.0, -51.0], device=device)
    token_ids, logprobs, _ = run_sampler(logits)
    assert token_ids.tolist() == [3000]
    torch.testing.assert_close(logprobs.double(), greedy(logits.double())[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [0, 2000, VOCAB_SIZE - 1, slice(None)], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_invalid_row_has_a_valid_token_and_an_invalid_logprob(
    value: float, columns: int | slice, device: torch.device
) -> None:
    logits = torch.randn(2, VOCAB_SIZE, device=device)
    logits[0, columns] = value
    token_ids, logprobs, _ = run_sampler(logits)
    # A single −inf is a masked token.
    assert logprobs.isfinite().tolist() == [value == -torch.inf and columns != slice(None), True]
    assert 0 <= int(token_ids[0]) < VOCAB_SIZE
    assert int(token_ids[1]) == int(logits[1].argmax())
