"""Models with sliding windows: the blocks behind a window are given back while sequences run, and are never read again.

The router's scheduler drives the engine. Before each step the free blocks of window groups are filled with NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from full_grid import full
from reference_kernels import reference_engine
from replica_world import ReplicaSetup, ReplicaWorld
from scheduler_checks import check_scheduler
from tiny_transformers import SHAPE as TINY_SHAPE
from tiny_transformers import random_model, save
from torch import Tensor
from transformers import Gemma2Config, MistralConfig, PretrainedConfig, PreTrainedModel

from text_generation_proto.values import WarmUpLimits
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine

WINDOW = 20
SHAPE = TINY_SHAPE | {"num_hidden_layers": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "some layers": Gemma2Config(**SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "all layers": MistralConfig(**SHAPE, sliding_window=WINDOW),
}
BASE = tuple((37 * i + 11) % 331 for i in range(120))
PROMPTS = [
    (BASE, 60),
    ((*BASE[:80], 5, 6, 7), 90),
    (BASE[:33], 70),
    ((*BASE[:64], *range(40)), 20),
    ((3, 1), 100),
    ((*BASE, 9), 40),
]
STEPS = 2000


class World:
    """A scheduler with one replica of a small pool, and the tokens of its requests."""

    def __init__(self, engine: TorchEngine, blocks: int, prefill_tokens: int, *, room_tokens: int = 256) -> None:
        """`room_tokens`: the window group has room for a chunk of this size."""
        self.engine = engine
        self.setup = ReplicaSetup(blocks, 4, max_batch_size=4, max_batch_prefill_tokens=room_tokens)
        self.scheduler = Scheduler(Policy(prefill_tokens, 4))
        self.tokens: dict[RequestId, list[int]] = {}
        self.open()

    def open(self) -> None:
        self.replica = ReplicaWorld(self.setup, self.engine)
        assert len(self.replica.spec.further_groups) == 1
        self.scheduler.open(0, self.replica.spec)

    def submit(self, prompt: tuple[int, ...], new: int) -> RequestId:
        request = Request(RequestId(len(self.tokens)), prompt, new, ignore_eos=True)
        self.scheduler.submit(request, 0.0)
        self.tokens[request.id] = []
        return request.id

    def turn(self) -> None:
        self.scheduler.dispatch()
        if (orders := self.scheduler.schedule(0)) is not None:
            self.replica.sent.append(orders)
        self.replica.orders_arrive()
        self.poison()
        self.replica.boundary_and_step()
        while self.replica.reports:
            output = self.replica.reports.popleft()
            deliveries = self.scheduler.update(0, output, 0.0)
            assert not deliveries.failed
            for request_id, start, end, _ in deliveries.tokens:
                self.tokens[request_id] += output.token_ids[start:end]
        check_scheduler(self.scheduler)

    @torch.inference_mode()
    def poison(self) -> None:
        """Fill the free blocks of the window group with NaN."""
        scheduler = self.scheduler.replicas[0]
        assert scheduler is not None
        free = [block.number for block in scheduler.cache.pools[0]._free]
        for layer in window_layers(self.engine):
            layer[free] = torch.nan

    def run(self) -> None:
        for _ in range(STEPS):
            if not self.scheduler.requests:
                return
            self.turn()
        raise AssertionError("a request never ends")


def window_layers(engine: TorchEngine) -> list[Tensor]:
    """Return the KV cache of each layer of the window group, by block."""
    runner = engine._executor._runner
    return [layer for group, layer in zip(runner._shape.groups, runner.cache, strict=True) if group]


def check(model: PreTrainedModel, prompt: tuple[int, ...], tokens: list[int]) -> None:
    """Check that each token is the most probable one, by transformers."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.fixture(scope="module", params=[full("all layers"), "some layers"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return random_model(CONFIGS[request.param])


@pytest.fixture(params=[build_engine, reference_engine], ids=["CPU", "device"])
def engine(request: pytest.FixtureRequest, model: PreTrainedModel, tmp_path: Path) -> Engine:
    build: Callable[[ShardConfig], Engine] = request.param
    # The number of drafts depends on measured times.
    path = save(model, tmp_path)
    return build(ShardConfig(model_path=path, device="cpu", max_batch_size=4, dtype="float32", speculate="0"))


@pytest.mark.parametrize(("prefill_tokens", "room_tokens"), [full(17, 256), (40, 17), full(64, 64)])
def test_texts_are_exact_though_blocks_are_given_back(
    engine: TorchEngine, model: PreTrainedModel, prefill_tokens: int, room_tokens: int
) -> None:
    world = World(engine, 16, prefill_tokens, room_tokens=room_tokens)
    for number, (prompt, new) in enumerate(PROMPTS):
        world.submit(prompt, new)
        for _ in range(3 * number):
            world.turn()
    for _ in range(20):
        world.turn()
    # The replica is lost: all go on in a new session, in chunks of what they have.
    world.scheduler.lose(0)
    engine.reset()
    world.open()
    world.run()
    for (prompt, new), tokens in zip(PROMPTS, world.tokens.values(), strict=True):
        assert len(tokens) == new
        check(model, prompt, tokens)
    stats = world.scheduler.stats()
    assert stats.moves > 0
    # In a window group with room for one sequence, others wait, and cached blocks are evicted.
    assert room_tokens < 256 or (stats.preemptions > 0 and stats.hit_tokens > 0)


def test_a_sequence_holds_the_blocks_of_its_window(engine: TorchEngine) -> None:
    world = World(engine, 16, 32)
    world.submit(BASE, 100)
    most = 0
    scheduler = world.scheduler.replicas[0]
    assert scheduler is not None
    while world.scheduler.requests:
        world.turn()
        most = max(most, scheduler.cache.pools[0].used)
    assert scheduler.cache.used == 0
    # The window, and a chunk that is being computed and one that is ordered, or the blocks for new tokens.
    assert 3 <= most <= 3 + 2 * 2 + 4


def test_the_next_turn_continues_after_the_last_answer(engine: TorchEngine, model: PreTrainedModel) -> None:
    world = World(engine, 32, 64)
    first = world.submit(BASE, 30)
    world.run()
    turn = (*BASE, *world.tokens[first], 4, 4, 4)
    second = world.submit(turn, 20)
    world.run()
    scheduler = world.scheduler.replicas[0]
    assert scheduler is not None
    assert scheduler.hit_tokens == 144  # of the 149 tokens whose KV was computed
    check(model, turn, world.tokens[second])
    # Another prompt finds the end of the first one, and whatever memory has not been needed since.
    for parts_at, cached in ((len(BASE) + 5, 112), (50, 48)):
        before = scheduler.hit_tokens
        other = world.submit((*turn[:parts_at], 1, 2, 3), 5)
        world.run()
        assert scheduler.hit_tokens - before == cached
        check(model, (*turn[:parts_at], 1, 2, 3), world.tokens[other])


def test_warm_up_divides_memory_between_groups(engine: TorchEngine) -> None:
    first, window = engine.warm_up(WarmUpLimits(max_batch_prefill_tokens=32, max_batch_total_tokens=1024))
    assert (first.num_blocks, first.window, window.window) == (64, None, WINDOW)
    # (20 + 64) / 512 of 64 blocks.
    assert window.num_blocks == 10
