"""Sampling is launched without reading from the device.

Without a GPU its tensors are on torch's meta device, which has no values: a read raises. With a GPU torch itself raises if
the host waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from text_generation_proto.values import Sampling
from text_generation_shard.engines.torch.sampling.penalties import SamplingRow
from text_generation_shard.engines.torch.sampling.sampler import SORTING, ThresholdSearch, sample, top_candidates

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "meta")
VOCABULARY = 3000

# torch warns each time the debug mode is set.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")

FILTERS = [Sampling(top_k=5), Sampling(top_p=0.5), Sampling(typical_p=0.5, greedy=False)]
"""Sorting on a CPU reads its result; the GPU's search does not."""
SEARCH = SORTING
if HAS_GPU:
    from text_generation_shard.engines.torch.kernels import threshold

    SEARCH = ThresholdSearch(threshold.smallest_set_threshold, threshold.kth_largest)


@contextmanager
def no_waiting() -> Iterator[None]:
    if HAS_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if HAS_GPU:
            torch.cuda.set_sync_debug_mode("default")


def every_stage() -> list[SamplingRow]:
    history = torch.tensor([1, 2, 2, 5], dtype=torch.int32).to(DEVICE)
    samplings = [
        Sampling(),
        Sampling(greedy=False, temperature=0.5, min_p=0.1),
        Sampling(repetition_penalty=1.2, frequency_penalty=0.5, output_presence_penalty=1.0, watermark=True),
        Sampling(logit_bias_ids=(3, 4), logit_bias_values=(1.0, -1.0)),
        *(FILTERS if HAS_GPU else []),
    ]
    rows = [SamplingRow(sampling, 4, 5, history, generated=2) for sampling in samplings]
    allowed = torch.ones(VOCABULARY, dtype=torch.bool)
    return [
        *rows,
        SamplingRow(Sampling(), 4, 5, suppressed=frozenset({7, VOCABULARY + 1})),
        SamplingRow(Sampling(greedy=False), 4, 5, allowed=allowed),
    ]


ALL_ALIKE = [SamplingRow(Sampling(greedy=False, temperature=0.5, min_p=0.2), 4, 5)] * 3


@pytest.mark.parametrize("rows", [every_stage(), ALL_ALIKE], ids=["every stage", "stages that all rows use"])
def test_no_stage_reads_from_the_device(rows: list[SamplingRow]) -> None:
    logits = torch.zeros(len(rows), VOCABULARY, device=DEVICE)
    sample(logits, rows, SEARCH)  # compiles kernels, allocates pinned memory
    with no_waiting():
        sampled = sample(logits, rows, SEARCH)
        top_candidates(sampled, [0, 2], 5)
    assert sampled.token_ids.shape == sampled.logprobs.shape == (len(rows),)
