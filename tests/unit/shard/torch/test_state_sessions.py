"""Sessions of chats over models with states, driven by the router's scheduler: reused prefixes give what computing everything gives.

Sessions have forks and templates that drop reasoning; pools are small, so that checkpoints are evicted and sequences preempted. They
are played again with drafts, of which any number is right.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from engine_driver import Driver
from full_grid import full
from native_families import first_layers, native_configs
from replica_world import ReplicaSetup, ReplicaWorld
from scheduler_checks import check_scheduler
from scripted_drafts import ScriptedDrafts, draft_by
from tiny_transformers import SHAPE, random_model, save

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FinishReason, WarmUpLimits
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling import checkpoints
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine

CONFIGS = native_configs(SHAPE | {"max_position_embeddings": 512}, head_dim=16, wide_head_dim=24)
CONFIGS["qwen3_5_text"] = first_layers(CONFIGS["qwen3_5_text"], 2)  # a state, and attention
SESSIONS = 100 if os.environ.get("TEST_FULL") else 2
AT_ONCE = 4
MARKER = (300, 301, 302)
"""The start of an answer; its last token begins the reasoning, and is dropped with it."""
BLOCK = 16
LONGEST = 400
NEAR = 1e-4
"""Difference of a log-probability that is looked into."""


@pytest.fixture(scope="module", params=["qwen3_5_text", full("nemotron_h"), full("lfm2")])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    engine = build(request.param, tmp_path_factory.mktemp("checkpoint"))
    draft_by(engine, None)
    return engine


def build(name: str, folder: Path, **settings: str) -> TorchEngine:
    settings = {"dtype": "float32", "speculate": "8"} | settings
    path = save(random_model(CONFIGS[name]), folder)
    engine = build_engine(ShardConfig(model_path=path, device="cpu", max_batch_size=AT_ONCE, **settings))
    assert isinstance(engine, TorchEngine)
    return engine


@pytest.fixture(autouse=True)
def many_checkpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpoints, "SPACING", 96)
    monkeypatch.setattr(checkpoints, "MIN_GAIN", 32)
    return


class FewStates(ReplicaWorld):
    """A replica that uses so many of its states."""

    def __init__(self, setup: ReplicaSetup, engine: TorchEngine, states: int) -> None:
        super().__init__(setup, engine)
        (group,) = self.spec.further_groups
        assert group.is_state
        assert group.num_blocks >= states
        object.__setattr__(self.spec, "further_groups", (CacheGroup(states, is_state=True),))


@dataclass
class Turn:
    """A request and its answer."""

    prompt: tuple[int, ...]
    new: int
    tokens: list[int]
    logprobs: list[float]
    computed: int = -1
    """Prompt tokens that were not cached when it was placed first."""


class World:
    """A scheduler with one replica, and sessions."""

    def __init__(self, engine: TorchEngine, blocks: int, states: int) -> None:
        self.engine, self.states = engine, states
        self.setup = ReplicaSetup(blocks, AT_ONCE, max_batch_size=AT_ONCE)
        self.scheduler = Scheduler(Policy(40, AT_ONCE))
        self.turns: list[Turn] = []
        self.resumed: list[int] = []
        """Cached tokens of sequences that went on after a preemption or a move."""
        self.steps = 0
        self.open()

    def open(self) -> None:
        self.replica = FewStates(self.setup, self.engine, self.states)
        self.scheduler.open(0, self.replica.spec)

    def submit(self, prompt: tuple[int, ...], new: int) -> Turn:
        turn_ends = (len(prompt) - len(MARKER),)
        self.scheduler.submit(
            Request(RequestId(len(self.turns)), prompt, new, ignore_eos=True, turn_ends=turn_ends), 0.0
        )
        self.turns.append(Turn(prompt, new, [], []))
        return self.turns[-1]

    def step(self) -> None:
        self.steps += 1
        self.scheduler.dispatch()
        if (orders := self.scheduler.schedule(0)) is not None:
            self.replica.sent.append(orders)
            for placement in orders.placements:
                turn = self.turns[placement.request.id]
                if placement.generated:
                    self.resumed.append(placement.cached_tokens)
                if turn.computed < 0:
                    turn.computed = len(turn.prompt) - placement.cached_tokens
        self.replica.orders_arrive()
        self.replica.boundary_and_step()
        while self.replica.reports:
            output, logprobs = self.replica.reports.popleft(), self.replica.logprobs.popleft()
            deliveries = self.scheduler.update(0, output, 0.0)
            assert not deliveries.failed
            for request_id, start, end, _ in deliveries.tokens:
                self.turns[request_id].tokens += output.token_ids[start:end]
                self.turns[request_id].logprobs += logprobs[start:end]
        check_scheduler(self.scheduler)

    def lose(self) -> None:
        """Lose the replica; all its requests move to its next session."""
        self.scheduler.lose(0)
        self.engine.reset()
        self.open()


def session(world: World, draw: Random, text: tuple[int, ...], turns: int) -> Iterator[None]:
    """Play the turns of a session; some fork."""
    strips, forks = draw.random() < 0.5, list[Iterator[None]]()
    while turns and len(text) < LONGEST - 80:
        turns -= 1
        text += tuple(draw.randrange(300) for _ in range(draw.choice([1, 5, 17, 40])))
        turn = world.submit((*text, *MARKER), draw.choice([1, 8, 24, 70]))
        while len(turn.tokens) < turn.new:
            forks = [each for each in forks if next(each, each) is None]
            yield
        if draw.random() < 0.2:
            forks.append(session(world, Random(draw.random()), text, draw.randint(1, 2)))
        text += (*MARKER[:2], *turn.tokens[turn.new // 2 :]) if strips else (*MARKER, *turn.tokens)
    while forks:
        forks = [each for each in forks if next(each, each) is None]
        yield


def check(*worlds: World) -> None:
    """Check all answers: computed again, each prompt whole, without reuse and drafts."""
    engine = worlds[0].engine
    same: dict[tuple[tuple[int, ...], int], list[Turn]] = {}
    for turn in (turn for world in worlds for turn in world.turns):
        same.setdefault((turn.prompt, turn.new), []).append(turn)
    requests = list(same)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096, max_batch_prefill_tokens=128)))
    logprobs, expected, inexact = list[float](), list[float](), list[tuple[Turn, list[float]]]()
    for some in (requests[first : first + AT_ONCE] for first in range(0, len(requests), AT_ONCE)):
        streams = [driver.admit(prompt, new) for prompt, new in some]
        driver.run()
        for turn, stream in ((turn, each) for key, each in zip(some, streams, strict=True) for turn in same[key]):
            assert stream.finish is FinishReason.LENGTH
            assert turn.tokens == stream.tokens
            logprobs += turn.logprobs
            expected += stream.logprobs
            if farthest(turn.logprobs, stream.logprobs) > NEAR:
                inexact.append((turn, stream.logprobs))
    own, reference = torch.tensor([logprobs, expected])
    assert (own - reference).norm() <= 1e-5 * reference.norm()
    # Where float32 itself is that inexact, other chunks differ as much.
    for turn, whole in inexact:
        streams = [driver.admit(turn.prompt, turn.new, chunk=chunk) for chunk in (11, 16, 17)]
        driver.run()
        assert farthest(turn.logprobs, whole) <= 4 * max(farthest(each.logprobs, whole) for each in streams)


def farthest(logprobs: list[float], others: list[float]) -> float:
    return max(abs(own - other) for own, other in zip(logprobs, others, strict=True))


def play(engine: TorchEngine, blocks: int, states: int, steps: int) -> World:
    """Play random sessions to their end; lose the replica after so many steps again and again."""
    draw = Random(blocks)
    world = World(engine, blocks, states)
    systems = [tuple(draw.randrange(300) for _ in range(length)) for length in (5, 50)]
    waiting = [
        session(world, Random(draw.random()), draw.choice(systems), draw.randint(2, 12)) for _ in range(SESSIONS)
    ]
    playing: list[Iterator[None]] = []
    for step in range(100 * len(waiting) * 12):
        playing += [waiting.pop() for _ in range(min(len(waiting), AT_ONCE - len(playing)))]
        playing = [each for each in playing if next(each, each) is None]
        if not playing and not waiting:
            break
        world.step()
        if step % steps == steps - 1:
            world.lose()
    stats = world.scheduler.stats()
    assert not world.scheduler.requests
    assert stats.hit_tokens > 0.15 * stats.prompt_tokens  # what is lost with the replica is computed again
    assert stats.moves
    return world


@pytest.mark.parametrize(("blocks", "states"), [pytest.param(36, 7, id="small"), full(200, 16)])
def test_random_sessions_get_the_same_with_reused_prefixes_and_drafts(
    engine: TorchEngine, blocks: int, states: int
) -> None:
    plain = play(engine, blocks, states, 100)
    texts = [(*turn.prompt, *turn.tokens) for turn in plain.turns]
    draft_by(engine, ScriptedDrafts(texts, 300))
    drafted = play(engine, blocks, states, 40)
    draft_by(engine, None)
    assert sorted(texts) == sorted((*turn.prompt, *turn.tokens) for turn in drafted.turns)
    assert drafted.steps < 0.8 * plain.steps
    check(plain, drafted)


def test_preempted_sequences_go_on_from_a_checkpoint(engine: TorchEngine) -> None:
    texts: list[tuple[int, ...]] = []
    for drafter in (None, ScriptedDrafts(texts, 300)):
        draft_by(engine, drafter)
        draw, world = Random(7), World(engine, 20, 9)
        for _ in range(AT_ONCE):
            world.submit((*(draw.randrange(300) for _ in range(50)), *MARKER), 60)
        while world.scheduler.requests:
            world.step()
        draft_by(engine, None)
        assert world.scheduler.stats().preemptions
        assert all(cached >= 48 for cached in world.resumed)
        check(world)
        texts += [(*turn.prompt, *turn.tokens) for turn in world.turns]


def test_a_turn_computes_its_new_tokens_and_at_most_one_block(engine: TorchEngine) -> None:
    draw, world = Random(5), World(engine, 200, 16)
    text: tuple[int, ...] = tuple(draw.randrange(300) for _ in range(40))
    before = 0
    for number in range(8):
        turn = world.submit((*text, *MARKER), 9)
        while len(turn.tokens) < turn.new:
            world.step()
        assert turn.computed <= len(turn.prompt) - before + BLOCK - 1
        before = len(text)  # the next turn agrees up to there
        text += (*MARKER[:2], *turn.tokens[4:]) if number % 2 else (*MARKER, *turn.tokens)
        text += tuple(draw.randrange(300) for _ in range(draw.randint(1, 40)))
    check(world)


def test_chats_with_one_system_prompt_compute_it_once(engine: TorchEngine) -> None:
    draw, world = Random(6), World(engine, 200, 16)
    system = tuple(draw.randrange(300) for _ in range(100))
    turns = [world.submit((*system, number, *range(number, 30), *MARKER), 4) for number in range(AT_ONCE)]
    while world.scheduler.requests:
        world.step()
    own = sum(len(turn.prompt) - len(system) + BLOCK for turn in turns)
    assert sum(turn.computed for turn in turns) <= len(system) + own
    check(world)


def test_a_model_that_transformers_runs_reuses_prefixes_too(tmp_path: Path) -> None:
    engine = build("lfm2", tmp_path, model_impl="transformers")
    assert engine.info.max_tokens_per_step == 1
    test_a_turn_computes_its_new_tokens_and_at_most_one_block(engine)
    test_chats_with_one_system_prompt_compute_it_once(engine)
