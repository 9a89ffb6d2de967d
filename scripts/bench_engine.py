"""Steps and tokens a second of the torch engine alone: prompts of 30 tokens, 64 new tokens, 1, 16 and 48 sequences.

python scripts/bench_engine.py MODEL_FOLDER
"""

from __future__ import annotations

import random
import sys
import time

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Admission, Engine, Orders, Stopping, WarmUpLimits
from text_generation_shard.engines import build_engine

PROMPT_TOKENS = 30
NEW_TOKENS = 64
ROUNDS = 3


def run(engine: Engine, sequences: int) -> tuple[int, float]:
    """Steps and seconds from the admission of all sequences to the last token of the last."""
    blocks = -(-(PROMPT_TOKENS + NEW_TOKENS) // engine.info.block_size)
    draw = random.Random(sequences)
    admissions = tuple(
        Admission(
            slot=slot,
            prompt=tuple(draw.randrange(engine.info.vocab_size) for _ in range(PROMPT_TOKENS)),
            stopping=Stopping(max_new_tokens=NEW_TOKENS),
            blocks=tuple(range(slot * blocks, (slot + 1) * blocks)),
        )
        for slot in range(sequences)
    )
    chunks = tuple((slot, PROMPT_TOKENS) for slot in range(sequences))
    started, steps = time.perf_counter(), 0
    engine.apply(Orders(number=1, admit=admissions, prefill=chunks))
    while engine.step():
        steps += 1
    return steps, time.perf_counter() - started


def main() -> None:
    engine = build_engine(ShardConfig(engine="torch", model_path=sys.argv[1]))
    started = time.perf_counter()
    engine.warm_up(WarmUpLimits())
    print(f"warm-up {time.perf_counter() - started:.1f} s, {engine.info.dtype} on {engine.info.device}")
    for sequences in (1, 16, 48):
        steps, seconds = min((run(engine, sequences) for _ in range(ROUNDS)), key=lambda outcome: outcome[1])
        tokens = sequences * NEW_TOKENS
        print(f"{sequences:3} sequences: {steps / seconds:6.1f} steps/s, {tokens / seconds:7.1f} tokens/s")


if __name__ == "__main__":
    main()
