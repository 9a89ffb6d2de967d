"""Sessions of agents: their statistics, and files of AIPerf's `weka_trace`."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from statistics import median

import pytest

from text_generation_bench.load.agents import AgentSession, AgentTurn, draw_session, read_weka


def test_sessions_have_the_published_statistics() -> None:
    random = Random(1)
    sessions = [draw_session(random) for _ in range(300)]
    turns = [pair for each in sessions for pair in each.contexts()]
    assert median(len(each.turns) for each in sessions) == pytest.approx(43, rel=0.1)
    assert median(max(context for _, context in each.contexts()) for each in sessions) == pytest.approx(142e3, rel=0.1)
    assert median(turn.new_tokens for turn, _ in turns) == pytest.approx(444, rel=0.05)
    sent = sum(context for _, context in turns)
    assert 1 - sum(turn.added for turn, _ in turns) / sent > 0.96
    with_subagents = sum(any(turn.subagents for turn in each.turns) for each in sessions)
    assert with_subagents / 300 == pytest.approx(0.44, abs=0.06)


def weka(at: float, length: int, new: int, blocks: list[int], pause: float = 0.0) -> dict[str, object]:
    return {"t": at, "type": "n", "model": "m", "in": length, "out": new, "hash_ids": blocks, "think_time": pause}


def test_a_weka_trace_is_read_with_its_subagents(tmp_path: Path) -> None:
    inner = {"t": 2.0, "type": "subagent", "agent_id": "a", "requests": [weka(2.0, 100, 5, [7, 8])]}
    requests = [
        weka(0.0, 130, 20, [1, 2, 3]),
        inner,
        weka(5.0, 200, 10, [1, 2, 3, 4], pause=1.5),
        weka(9.0, 100, 10, [1, 9], pause=600.0),
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"id": "t", "block_size": 64, "requests": requests}))
    child = AgentSession(0, (AgentTurn(0, 100, 5, 0.0),))
    assert read_weka(tmp_path) == [
        AgentSession(
            0, (AgentTurn(0, 130, 20, 0.0), AgentTurn(150, 50, 10, 1.5, (child,)), AgentTurn(64, 36, 10, 10.0))
        )
    ]
    file.write_text('{"requests": [{"type": "n"}]}')
    with pytest.raises(ValueError, match="no trace of an agent"):
        read_weka(file)
