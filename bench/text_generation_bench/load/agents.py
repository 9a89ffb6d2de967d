"""Sessions of coding agents: turns that resend a growing context, pauses of tool calls, sub-agents.

`draw_session` draws them after the statistics that were published of such traffic in 2026: a median of 43 turns, contexts that
grow to about 142,000 tokens, 444 new tokens a turn, sub-agents in 44 % of the sessions, and more than 96 % of the tokens sent before.
`read_weka` reads them from the files of AIPerf's `weka_trace`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

SYSTEM_TOKENS, TASK_TOKENS = 16_000, 2_000
"""Tokens of the instructions and tools, which sessions share, and of a task (median)."""
TURNS, SUBAGENT_TURNS = 43, 8
"""Median numbers of turns."""
LONGEST_CONTEXT, SUMMARY_TOKENS = 200_000, 8_000
"""Tokens of the longest context, and of a summary (median)."""
ADDED_TOKENS, NEW_TOKENS = 1_200, 444
"""Median tokens of the result of a tool, and of an answer."""
PAUSE_S, LONGEST_PAUSE_S = 2.0, 10.0
"""Median pause of a tool call; longer ones are cut, as AIPerf's scenario for agents does."""
WITH_SUBAGENTS = 0.44
SUBAGENTS, SPAWNS = 4, 2
"""Most sub-agents at a time, and times that a session starts some."""


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """A request of an agent, which contains what was sent and answered before."""

    kept: int | None
    """Tokens of the context that are sent again; None: all."""
    added: int
    """Tokens after them."""
    new_tokens: int
    pause_s: float
    """Seconds from the answer before, or from the end of the sub-agents."""
    subagents: tuple[AgentSession, ...] = ()
    """Sessions that begin with the answer before, and end before this request."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """A session of one agent."""

    system_tokens: int
    """Leading tokens that it shares with all sessions of its kind."""
    turns: tuple[AgentTurn, ...]

    def contexts(self) -> Iterator[tuple[AgentTurn, int]]:
        """Yield the turns, those of sub-agents first, with the tokens of the prompt of each."""
        context = self.system_tokens
        for turn in self.turns:
            for each in turn.subagents:
                yield from each.contexts()
            context = min(context, turn.kept if turn.kept is not None else context) + turn.added
            yield turn, context
            context += turn.new_tokens


def draw_session(random: Random, scale: float = 1.0, *, is_subagent: bool = False) -> AgentSession:
    """Draw a session; `scale` shortens its texts."""

    def tokens(median: float, sigma: float) -> int:
        return max(1, round(scale * random.lognormvariate(math.log(median), sigma)))

    count = max(2, round(random.lognormvariate(math.log(SUBAGENT_TURNS if is_subagent else TURNS), 0.7)))
    spawns: set[int] = set()
    if not is_subagent and random.random() < WITH_SUBAGENTS:
        spawns = {random.randrange(1, count) for _ in range(random.randint(1, SPAWNS))}
    turns: list[AgentTurn] = []
    context = system = round(scale * SYSTEM_TOKENS)
    for number in range(count):
        added = tokens(ADDED_TOKENS, 1.2) if number else tokens(TASK_TOKENS, 0.8)
        new = tokens(NEW_TOKENS, 0.8)
        pause = min(LONGEST_PAUSE_S, random.lognormvariate(math.log(PAUSE_S), 1.2)) if number else 0.0
        agents = random.randint(1, SUBAGENTS) if number in spawns else 0
        subagents = tuple(draw_session(random, scale, is_subagent=True) for _ in range(agents))
        kept = None
        if context + added + new > scale * LONGEST_CONTEXT:  # it goes on with a summary of what was before
            kept, added = system, tokens(SUMMARY_TOKENS, 0.3)
        context = (context if kept is None else kept) + added + new
        turns.append(AgentTurn(kept, added, new, pause, subagents))
    return AgentSession(system, tuple(turns))


def read_weka(path: Path) -> list[AgentSession]:
    """Return the sessions of a file of AIPerf's `weka_trace`, or of a folder of them. Raises ValueError, OSError."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    return [_weka_session(json.loads(file.read_text(encoding="utf-8")), file) for file in files]


def _weka_session(trace: Any, file: Path) -> AgentSession:  # noqa: ANN401 - any JSON value
    try:
        return AgentSession(0, tuple(_weka_turns(trace["requests"], trace.get("block_size", 64))))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: no trace of an agent: {error!r}") from error


def _weka_turns(requests: Sequence[dict[str, Any]], block: int) -> Iterator[AgentTurn]:
    """Yield turns; blocks with other numbers than before begin what a request adds."""
    subagents: list[AgentSession] = []
    context, blocks = 0, list[int]()
    for request in requests:
        if request["type"] == "subagent":
            subagents.append(AgentSession(0, tuple(_weka_turns(request["requests"], block))))
            continue
        ids = request.get("hash_ids") or blocks
        same = next((at for at, pair in enumerate(zip(ids, blocks, strict=False)) if pair[0] != pair[1]), len(blocks))
        kept = min(context, request["in"], context if same == len(blocks) else same * block)
        pause = min(LONGEST_PAUSE_S, max(0.0, request.get("think_time") or 0.0))
        yield AgentTurn(kept, request["in"] - kept, max(1, request["out"]), pause, tuple(subagents))
        subagents, blocks, context = [], ids, request["in"] + request["out"]
