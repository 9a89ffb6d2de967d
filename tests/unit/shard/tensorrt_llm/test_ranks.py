"""Attention data parallelism: each rank has a batch, a queue and a prefix cache of its own."""

from __future__ import annotations

from pathlib import Path

from self_driver import SelfDriver
from standin import read_log
from trtllm_engines import Engines

from text_generation_proto.values import Stopping
from text_generation_shard.engine import NewSequence, Orders
from text_generation_shard.engines.tensorrt_llm.engine import TensorRTEngine

RANKS = "{enable_attention_dp: true, kv_cache_config: {max_tokens: 512}}"
PROMPT = tuple(range(100, 220))


def two_ranks(built: Engines, **settings: object) -> tuple[TensorRTEngine, SelfDriver]:
    engine = built(num_shard=2, max_batch_size=2, options=RANKS, **settings)
    return engine, SelfDriver(engine)


def test_a_sequence_for_a_full_rank_waits_for_it(built: Engines, tmp_path: Path) -> None:
    engine, driver = two_ranks(built, step_ms=2, log=tmp_path / "log")
    assert (engine.info.ranks, engine.info.max_slots, engine.info.max_sequence_length) == (2, 4, 512)
    for new, rank in ((200, 2), (200, 2), (5, 2), (5, 1)):
        driver.admit(PROMPT[:10], new, rank=rank)
    driver.run()
    log = read_log(tmp_path / "log")
    first, second, third, other = (request["id"] for request in log.of("request")[-4:])
    ends = [end["id"] for end in log.of("end")[-4:]]
    assert ends[0] == other
    assert ends.index(third) > min(ends.index(first), ends.index(second))


def test_a_rank_reuses_what_it_has_computed_itself(built: Engines, tmp_path: Path) -> None:
    _, driver = two_ranks(built, log=tmp_path / "log")
    found = []
    for rank in (2, 1, 2, 1):
        driver.cached.clear()
        driver.admit(PROMPT, 2, rank=rank)
        driver.run()
        found.append([tokens for _, tokens in driver.cached])
    assert found == [[], [], [96], [96]]
    assert [request.get("rank") for request in read_log(tmp_path / "log").of("request")[-4:]] == [1, 0, 1, 0]


def test_sequences_with_and_without_a_rank_start_together(built: Engines) -> None:
    """1.2 compares what is not set with what is, which ends its loop."""
    _, driver = two_ranks(built, step_ms=10)
    streams = [driver.admit(PROMPT[:10], 5, rank=rank) for rank in (0, 1, 0, 2)]
    driver.run()
    assert [stream.tokens for stream in streams] == [list(PROMPT[:5])] * 4


def test_a_rank_that_is_not_there_is_refused(built: Engines) -> None:
    engine, _ = two_ranks(built)
    [failure] = engine.apply(Orders(1, placements=(NewSequence(0, PROMPT, Stopping(1), rank=3),)))
    assert failure.message == "rank 3 is not one of 2"
