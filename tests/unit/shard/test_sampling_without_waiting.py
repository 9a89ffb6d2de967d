"""The choice is launched without a look at what the device holds.

Without a GPU its tensors lie on torch's meta device, which has no numbers: whatever reads one raises. With a GPU torch
itself raises where the host would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from text_generation_proto.values import Sampling
from text_generation_shard.engines.torch.sampling.choose import choose
from text_generation_shard.engines.torch.sampling.rows import SamplingRow
from text_generation_shard.engines.torch.sampling.top_candidates import top_candidates

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "meta")
VOCABULARY = 3000

# torch says so each time its watch is set.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")

FILTERS = [Sampling(top_k=5), Sampling(top_p=0.5), Sampling(typical_p=0.5, greedy=False)]
"""A search on a CPU reads what it has found, the kernel does not."""


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


def test_no_stage_reads_from_the_device() -> None:
    rows = every_stage()
    logits = torch.zeros(len(rows), VOCABULARY, device=DEVICE)
    choose(logits, rows)  # compiles kernels, has memory pinned
    with no_waiting():
        choices = choose(logits, rows)
        top_candidates(choices, [0, 2], 5)
    assert choices.token_ids.shape == choices.logprobs.shape == (len(rows),)


def test_nor_does_a_step_whose_rows_all_ask_for_the_same() -> None:
    rows = [SamplingRow(Sampling(greedy=False, temperature=0.5, min_p=0.2), 4, 5)] * 3
    logits = torch.zeros(len(rows), VOCABULARY, device=DEVICE)
    choose(logits, rows)
    with no_waiting():
        choose(logits, rows)
