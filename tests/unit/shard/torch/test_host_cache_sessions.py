"""Sessions that outgrow the device's cache, driven by the router's scheduler: loaded prefixes give what computing everything gives.

Two replicas share the memory of a host. Sequences are preempted, replicas die, and bytes of the memory change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from byte_tokenizer import write_tokenizer
from full_grid import full
from native_families import LATENT, first_layers, native_configs
from replica_world import ReplicaSetup, ReplicaWorld
from scheduler_checks import assert_idle, check_scheduler
from scripted_drafts import draft_by
from tiny_transformers import SHAPE, random_model, save
from transformers import Gemma2Config, LlamaConfig, PretrainedConfig, YoutuConfig

from text_generation_proto.values import Grammar, GrammarKind, LogprobOptions, Sampling
from text_generation_router.request import NO_MOVES, Request, RequestId, RequestProgress
from text_generation_router.scheduling import roles
from text_generation_router.scheduling.host_cache import HostCache
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine

LONG = SHAPE | {"max_position_embeddings": 512}
CONFIGS: dict[str, PretrainedConfig] = {
    "full": LlamaConfig(**LONG),
    "window": Gemma2Config(**LONG, sliding_window=40, query_pre_attn_scalar=16),
    "latent": YoutuConfig(**LONG | LATENT),
    "state": first_layers(native_configs(LONG, head_dim=16, wide_head_dim=24)["qwen3_5_text"], 2),
}
HOST_BYTES = 4 << 20
AT_ONCE = 3
BLOCK = 16
MARKER = (300, 301)
Engines = tuple[int, list[TorchEngine]]
"""The file of the host cache, and the engines that share it."""


@pytest.fixture(scope="module", params=[full("full"), full("window"), full("latent"), "state"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = save(random_model(CONFIGS[request.param]), tmp_path_factory.mktemp("checkpoint"))
    write_tokenizer(Path(folder))
    file = os.memfd_create("host")
    os.ftruncate(file, HOST_BYTES)
    config = ShardConfig(
        model_path=folder,
        device="cpu",
        max_batch_size=AT_ONCE,
        dtype="float32",
        speculate="2",  # blocks of states have places for drafts, of which there are none
        host_cache_fd=file,
        host_cache_name="host",
        host_cache_bytes=HOST_BYTES,
    )
    built = [build_engine(config) for _ in range(2)]
    for engine in built:
        draft_by(engine, None)
    yield file, built  # type: ignore[misc]
    for engine in built:
        engine.close()
    os.close(file)


class World:
    """A scheduler with two replicas of small pools, and the answers to its requests."""

    def __init__(
        self,
        engines: Engines,
        blocks: int = 26,
        replicas: int = 2,
        *,
        with_host: bool = True,
        prefill_replicas: int = 0,
    ) -> None:
        self.engines = engines[1][:replicas]
        self.setup = ReplicaSetup(blocks, AT_ONCE, max_batch_size=AT_ONCE)
        self.with_host = with_host
        policy = Policy(64, AT_ONCE, max_request_moves=100, prefill_replicas=prefill_replicas)
        self.scheduler = Scheduler(policy, replicas)
        self.requests: dict[RequestId, Request] = {}
        self.answers: dict[RequestId, list[int]] = {}
        self.logprobs: dict[RequestId, list[float]] = {}
        self.computed: dict[RequestId, int] = {}
        """Tokens that were not cached when each request was placed last."""
        self.handed_over = self.restarts = 0
        """Times that a request went on at the second replica after it had begun at the first."""
        self.replicas = [self.open(number) for number in range(replicas)]

    def open(self, number: int) -> ReplicaWorld:
        replica = ReplicaWorld(self.setup, self.engines[number])
        if not self.with_host:
            object.__setattr__(replica.spec, "host_cache", "")
        self.scheduler.open(number, replica.spec)
        return replica

    def kill(self, number: int) -> None:
        """Let a shard die and come back with an empty device."""
        self.scheduler.lose(number)
        self.replicas[number] = self.open(number)

    @property
    def host(self) -> HostCache:
        (host,) = self.scheduler.host_caches
        return host

    def restart(self) -> None:
        """Let the scheduler's process die: its successor gets the requests and their tokens, and knows nothing of the host."""
        live = list(self.scheduler.requests)
        self.restarts += 1
        self.scheduler = Scheduler(self.scheduler.policy, len(self.replicas), first_store=self.restarts << 20)
        for engine in self.engines:
            engine.reset()
        self.replicas = [self.open(number) for number in range(len(self.replicas))]
        for each in live:
            progress = RequestProgress(tuple(self.answers[each]), NO_MOVES)
            self.scheduler.submit(self.requests[each], 0.0, progress)

    def move(self, number: int) -> int:
        """Let a replica drain; return the running sequences that are to be stored and to go on elsewhere."""
        self.scheduler.drain(number)
        self.scheduler.evacuate(number)
        replica = self.scheduler.replicas[number]
        assert replica is not None
        return len(replica.copies.moving)

    def submit(self, prompt: tuple[int, ...], new: int, **options: Any) -> RequestId:  # noqa: ANN401
        turn_ends = (len(prompt) - len(MARKER),)
        request = Request(RequestId(len(self.answers)), prompt, new, ignore_eos=True, turn_ends=turn_ends, **options)
        self.requests[request.id] = request
        self.answers[request.id], self.logprobs[request.id] = [], []
        self.scheduler.submit(request, 0.0)
        return request.id

    def step(self) -> None:
        self.scheduler.dispatch()
        for number, replica in enumerate(self.replicas):
            if (orders := self.scheduler.schedule(number)) is not None:
                replica.sent.append(orders)
                for each in orders.placements:
                    known = len(each.request.prompt) + len(each.generated)
                    self.computed[each.request.id] = known - each.cached_tokens
                    self.handed_over += number == 1 and bool(each.generated) and each.cached_tokens > 0
            replica.orders_arrive()
            replica.boundary_and_step()
            for thread in self.engines[number]._executor.host._threads.values():
                thread.submit(lambda: None).result()  # copies end by the next step
            while replica.reports:
                output, logprobs = replica.reports.popleft(), replica.logprobs.popleft()
                deliveries = self.scheduler.update(number, output, 0.0)
                assert not deliveries.failed
                for request_id, start, end, _ in deliveries.tokens:
                    self.answers[request_id] += output.token_ids[start:end]
                    self.logprobs[request_id] += logprobs[start:end]
        check_scheduler(self.scheduler)

    def run(self) -> None:
        """Step until there is nothing to compute and to copy."""
        scheduler = self.scheduler
        while scheduler.requests or any(each.copies.is_storing or each.may_have_orders for each in scheduler.serving):
            self.step()


def play(world: World, sessions: int, seed: int, *, file: int | None = None) -> list[list[int]]:
    """Play sessions of three turns, round by round, with deaths of shards; return all answers. With `file`, spoil half of it."""
    draw = Random(seed)
    texts = [tuple(draw.randrange(300) for _ in range(draw.randint(60, 130))) for _ in range(sessions)]
    for turn in range(3):
        requests = [world.submit((*text, *MARKER), draw.choice([1, 30, 60])) for text in texts]
        for _ in range(draw.randint(5, 25)):
            world.step()
        world.kill(turn % len(world.replicas))
        world.run()
        for index, request in enumerate(requests):
            new = tuple(draw.randrange(300) for _ in range(draw.randint(1, 30)))
            texts[index] += (*MARKER, *world.answers[request], *new)
        if file is not None and turn == 1:
            os.pwrite(file, bytes(HOST_BYTES // 2), 0)
    return list(world.answers.values())


def test_texts_are_the_same_with_a_host_cache(engines: Engines) -> None:
    plain = World(engines, with_host=False)
    expected = play(plain, 4, 1)
    world = World(engines)
    assert play(world, 4, 1) == expected
    assert world.host.counts["stored"] > 30
    assert world.host.counts["loaded"] > 20
    assert not world.host.counts["failed"]
    stats, without = world.scheduler.stats(), plain.scheduler.stats()
    assert stats.hit_tokens > 1.05 * without.hit_tokens
    spoilt = World(engines)
    assert play(spoilt, 4, 1, file=engines[0]) == expected
    assert spoilt.host.counts["failed"]


def test_texts_are_the_same_with_two_roles(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "LEAST_PROMPT", 48)
    draw = Random(5)
    prompts = [(*(draw.randrange(300) for _ in range(100)), *MARKER) for _ in range(6)]

    def serve(world: World, killed: tuple[int, ...]) -> dict[RequestId, list[int]]:
        for at, number in enumerate(killed):
            requests = [world.submit(prompt, 40) for prompt in prompts[3 * at : 3 * at + 3]]
            while not all(len(world.answers[each]) > 8 for each in requests):
                world.step()
            world.kill(number)
            world.run()
        return world.answers

    expected = serve(World(engines, 60, 1, with_host=False), (0, 0))
    world = World(engines, 60, prefill_replicas=1)
    assert serve(world, (0, 1)) == expected
    assert world.handed_over >= 4


def test_a_shard_that_died_comes_back_to_a_warm_cache(engines: Engines) -> None:
    world, draw = World(engines, 60, 1), Random(3)
    text = tuple(draw.randrange(300) for _ in range(150))
    for _ in range(3):
        request = world.submit((*text, *MARKER), 20)
        world.run()
        new = tuple(draw.randrange(300) for _ in range(25))
        before, text = len(text), (*text, *MARKER, *world.answers[request], *new)
        world.kill(0)
        again = world.submit((*text, *MARKER), 5)
        world.run()
        # Of a state there is a checkpoint before the answer.
        assert world.computed[again] <= len(text) + len(MARKER) - before + BLOCK


def test_preempted_sequences_go_on_with_the_same_texts(engines: Engines) -> None:
    answers = []
    for with_host in (False, True):
        world = World(engines, 12, 1, with_host=with_host)
        for number in range(AT_ONCE):
            world.submit((*range(number, number + 50), *MARKER), 60)
        world.run()
        assert world.scheduler.stats().preemptions
        answers.append(world.answers)
    assert answers[0] == answers[1]


def test_a_prefix_is_loaded_once(engines: Engines) -> None:
    world = World(engines, 60, 1)
    prompt = (*range(150), *MARKER)
    world.submit(prompt, 4)
    world.run()
    world.kill(0)
    requests = [world.submit(prompt, 4) for _ in range(2)]
    world.run()
    loaded = world.host.counts["loaded"]
    requests.append(world.submit(prompt, 4))
    world.run()
    assert world.host.counts["loaded"] == loaded > 0
    assert all(world.computed[each] <= len(MARKER) + BLOCK for each in requests)


def test_a_sequence_moves_without_computing_again(engines: Engines) -> None:
    draw = Random(4)
    prompt = (*(draw.randrange(300) for _ in range(150)), *MARKER)
    texts = []
    for moves in (0, 3):
        world = World(engines, 60)
        request = world.submit(prompt, 90)
        replica = 0
        for number in range(moves):
            while len(world.answers[request]) < 20 * number + 20:
                world.step()
            (replica,) = (each.replica for each in world.scheduler.serving if each.occupied_slots)
            world.scheduler.drain(replica)
            world.scheduler.evacuate(replica)
            while not world.scheduler.replicas[1 - replica]._running:
                world.step()
            world.scheduler.drain(replica, draining=False)
            if world.scheduler.serving[0].cache.states is None:
                assert world.computed[request] <= BLOCK
        world.run()
        texts.append(world.answers[request])
    assert texts[0] == texts[1]


def test_sequences_under_way_when_their_shard_dies_go_on(engines: Engines) -> None:
    world = World(engines, 60, 1)
    text = tuple(range(150))
    world.submit((*text, *MARKER), 4)
    world.run()
    world.kill(0)
    late = world.submit((*text, 7, *MARKER), 4)
    world.step()
    assert list(world.scheduler.serving[0].copies.loading), "its load is under way"
    world.kill(0)
    world.run()
    assert len(world.answers[late]) == 4
    assert world.computed[late] <= 4 + BLOCK


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"sampling": Sampling(greedy=False, temperature=0.9, seed=7)},
    {"grammar": Grammar(GrammarKind.REGEX, "[a-z]{200}")},
    {"logprobs": LogprobOptions(tokens=True)},
    {"logprobs": LogprobOptions(prompt=True)},
)


class MixedLoad:
    """Sessions whose turns are of all kinds, some with two answers."""

    def __init__(self, world: World, draw: Random, sessions: int = 5) -> None:
        self._world, self._draw = world, draw
        self._texts: list[tuple[int, ...]] = [()] * sessions
        self._asked: list[list[RequestId]] = [[] for _ in range(sessions)]

    def ask(self) -> None:
        """Go on with the sessions whose turn has ended; those with a long text begin anew."""
        world, draw = self._world, self._draw
        for number, asked in enumerate(self._asked):
            if any(each in world.scheduler.requests for each in asked):
                continue
            text = (*self._texts[number], *(world.answers[asked[0]] if asked else ()))
            text = text if len(text) < 250 else ()
            text += tuple(draw.randrange(300) for _ in range(draw.randint(10, 40) if text else draw.randint(60, 130)))
            options, new = draw.choice(KINDS), draw.choice([5, 30, 60])
            self._asked[number] = [world.submit((*text, *MARKER), new, **options)]
            if draw.random() < 0.2:
                sampling = Sampling(greedy=False, seed=draw.randrange(1000))
                self._asked[number].append(world.submit((*text, *MARKER), new, sampling=sampling))
            self._texts[number] = (*text, *MARKER)


@pytest.mark.parametrize(("moves", "kills"), [(6, 2), full(250, 50)])
def test_sequences_that_move_and_lose_their_shards_go_on_with_the_same_texts(
    engines: Engines, moves: int, kills: int
) -> None:
    draw = Random(moves)
    world = World(engines, 50)
    load = MixedLoad(world, draw)
    moved = killed = loaded = 0
    while moved < moves or killed < kills or not loaded + world.host.counts["loaded"]:
        load.ask()
        world.step()
        chance, number = draw.random(), draw.randrange(2)
        if chance < 0.1 and moved < moves:
            moved += world.move(number)
        elif chance < 0.2:
            world.scheduler.drain(number, draining=False)
        elif chance < 0.23 and killed < kills:
            if killed % 2:  # it dies in a store
                os.pwrite(engines[0], draw.randbytes(HOST_BYTES // 8), 0)
            world.kill(number)
            killed += 1
        elif chance < 0.235:
            loaded += world.host.counts["loaded"]
            world.restart()
    for number in range(2):
        world.scheduler.drain(number, draining=False)
    world.run()
    assert_idle(world.scheduler)
    plain = World(engines, 50, with_host=False)
    for request in world.requests.values():
        plain.submit(
            tuple(request.prompt),
            request.max_new_tokens,
            **{name: getattr(request, name) for name in ("sampling", "grammar", "logprobs")},
        )
    plain.run()
    assert plain.answers == world.answers
    for each, expected in plain.logprobs.items():
        assert world.logprobs[each] == pytest.approx(expected, abs=1e-3)
