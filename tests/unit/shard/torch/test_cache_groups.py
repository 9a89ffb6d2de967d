"""The division of memory between the groups of a KV cache: shapes of known models, and its limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_engines import TINY_LLAMA

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineInfo, InsufficientMemory, Scheduling
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE, CacheShape, LayerShape
from text_generation_shard.engines.torch.build.footprint import native_footprint
from text_generation_shard.engines.torch.build.prepare import Prepared, Target
from text_generation_shard.engines.torch.engine.warm_up import cache_groups, deep_step, with_host_blocks
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.parameters import empty_weights
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.step.table import SequenceTable

INFO = EngineInfo(
    engine="torch",
    model_id="",
    model_type=str(TINY_LLAMA["model_type"]),
    dtype="bfloat16",
    device="cuda:0",
    scheduling=Scheduling.STEP,
    vocab_size=1000,
    max_sequence_length=131072,
    max_slots=256,
    block_size=BLOCK_SIZE,
    eos_token_ids=(),
    suggested_prefill_tokens=8192,
    max_top_n_tokens=0,
)
LIMITS = WarmUpLimits()


def shape(full: int, windows: int, window: int, heads: tuple[int, int], longest: int = 131072) -> CacheShape:
    """Return the shape of a cache of `full` layers and of `windows` layers with a sliding window."""
    num_kv_heads, head_dim = heads
    layers = [LayerShape(num_kv_heads, num_kv_heads, head_dim, width) for width in [None] * full + [window] * windows]
    return CacheShape(tuple(layers), torch.device("meta"), torch.bfloat16, longest)


GEMMA_3_27B = shape(10, 52, 1024, (16, 128))
GPT_OSS_20B = shape(12, 12, 128, (8, 64))
GPT_OSS_120B = shape(18, 18, 128, (8, 64))


def tokens(cache: CacheShape, nbytes: int, info: EngineInfo = INFO) -> list[int]:
    groups = cache_groups(info, LIMITS, cache.kinds, cache.block_bytes, nbytes)
    taken = sum(group.num_blocks * size for group, size in zip(groups, cache.block_bytes, strict=True))
    assert 0.99 * nbytes < taken <= nbytes
    return [group.num_blocks * BLOCK_SIZE for group in groups]


@pytest.mark.parametrize(
    ("cache", "gain"), [(GEMMA_3_27B, 4.0), (GPT_OSS_20B, 1.8), (GPT_OSS_120B, 1.8)], ids=["gemma", "20b", "120b"]
)
@pytest.mark.parametrize("gib", [16, 60])
def test_a_cache_with_windows_holds_more_tokens(cache: CacheShape, gain: float, gib: int) -> None:
    before = (gib << 30) // sum(cache.block_bytes) * BLOCK_SIZE
    full, window = tokens(cache, gib << 30)
    assert full >= gain * before
    # A tenth, and enough for a sequence that computes the largest chunk.
    assert window >= full // 10 - BLOCK_SIZE
    assert window > 8192


@pytest.mark.parametrize("cache", [GEMMA_3_27B, GPT_OSS_20B], ids=["gemma", "20b"])
def test_a_host_cache_is_used_whole_also_where_few_sequences_run(cache: CacheShape) -> None:
    info, nbytes = replace(INFO, max_slots=1), 64 << 30
    groups = with_host_blocks(cache.kinds, info, LIMITS, cache.block_bytes, nbytes)
    taken = sum(group.host_blocks * size for group, size in zip(groups, cache.block_bytes, strict=True))
    assert 0.99 * nbytes < taken <= nbytes


def test_a_window_not_shorter_than_a_sequence_has_no_group() -> None:
    assert shape(1, 2, 4096, (2, 64), longest=4096).windows == (None,)
    assert shape(1, 2, 4095, (2, 64), longest=4096).windows == (None, 4095)


def test_a_model_of_windows_alone_has_a_full_group_without_layers() -> None:
    cache = shape(0, 32, 4096, (8, 128), longest=32768)
    assert cache.block_bytes == (0, 32 * 2 * 8 * 128 * 2 * BLOCK_SIZE)
    full, window = tokens(cache, 20 << 30, replace(INFO, max_sequence_length=32768))
    # A sequence of 16,384 tokens holds a quarter of its blocks.
    assert 0.25 < window / full < 0.26


def test_a_share_follows_from_the_longest_sequence() -> None:
    cache = shape(13, 13, 4096, (4, 256), longest=8192)
    full, window = tokens(cache, 10 << 30, replace(INFO, max_sequence_length=8192))
    assert 0.5 < window / full < 0.52


def test_with_a_limit_of_sequences_as_many_short_ones_fit() -> None:
    cache, length = GEMMA_3_27B, 640

    def fitting(most: int) -> int:
        limits = WarmUpLimits(max_batch_size=most, max_batch_prefill_tokens=2048)
        groups = cache_groups(INFO, limits, cache.kinds, cache.block_bytes, 20 << 30)
        return min(group.num_blocks // group.blocks_held(length, BLOCK_SIZE) for group in groups)

    assert fitting(0) == fitting(8) < 30, "sequences are taken to be long"
    assert fitting(64) > 54


def test_the_tokens_asked_for_are_those_of_the_first_group() -> None:
    limits = WarmUpLimits(max_batch_total_tokens=64000, max_batch_prefill_tokens=512)
    cache = GPT_OSS_20B
    groups = cache_groups(INFO, limits, cache.kinds, cache.block_bytes, 1 << 40)
    assert groups == (CacheGroup(4000), CacheGroup(400, 128))
    needed = 4000 * cache.block_bytes[0] + 400 * cache.block_bytes[1]
    assert cache_groups(INFO, limits, cache.kinds, cache.block_bytes, needed) == groups
    with pytest.raises(InsufficientMemory, match=r"^64000 tokens of KV cache .* room for 63\d\d\d tokens"):
        cache_groups(INFO, limits, cache.kinds, cache.block_bytes, needed - 1)


def test_a_window_group_never_has_more_blocks_than_the_first() -> None:
    groups = cache_groups(
        INFO, WarmUpLimits(max_batch_total_tokens=160), (CacheGroup(0), CacheGroup(0, 128)), (1, 1), 100
    )
    assert groups == (CacheGroup(10), CacheGroup(10, 128))


def test_states_get_the_memory_of_four_for_each_usual_sequence() -> None:
    state, token = 60 << 20, 24 << 10  # those of Qwen3-Next
    cache = replace(shape(12, 0, 1, (2, 256)), state_bytes=state)
    groups = cache_groups(INFO, LIMITS, cache.kinds, cache.block_bytes, 60 << 30)
    assert [group.name for group in groups] == ["full", "state"]
    assert cache.block_bytes == (token * BLOCK_SIZE, state)
    tokens, states = groups[0].num_blocks * BLOCK_SIZE, groups[1].num_blocks
    assert states == 4 * tokens // 16384 == 393
    assert 0.99 * (60 << 30) < token * tokens + state * (states + 1) <= 60 << 30
    # The states do not shrink with the tokens asked for; a limit of sequences gets a state for each, of half of the memory.
    limits = WarmUpLimits(max_batch_total_tokens=16000)
    assert cache_groups(INFO, limits, cache.kinds, cache.block_bytes, 60 << 30)[1].num_blocks == states
    limits = WarmUpLimits(max_batch_size=256)
    assert cache_groups(INFO, limits, cache.kinds, cache.block_bytes, 20 << 30)[1].num_blocks == (10 << 30) // state
    with pytest.raises(InsufficientMemory):
        cache_groups(INFO, LIMITS, cache.kinds, cache.block_bytes, 3 * state)


def test_latent_rows_of_deepseek_v3_take_576_numbers_of_a_token_and_layer(tmp_path: Path) -> None:
    """By the formula of `check`; two ranks have the same rows."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "deepseek_v3",
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "num_hidden_layers": 4,
                "num_attention_heads": 128,
                "vocab_size": 1000,
                "max_position_embeddings": 4096,
                "dtype": "bfloat16",
            }
        )
    )
    config = ShardConfig(model_path=str(tmp_path), load_format="dummy", device="cpu")
    model = read_model_config(tmp_path)
    prepared = Prepared(model, Target(torch.device("cpu"), 1 << 40), INFO, None)
    footprint = native_footprint(config, prepared, LIMITS)
    assert footprint.cache_shape is not None
    assert footprint.cache_shape.block_bytes == (576 * 4 * BLOCK_SIZE * 2,)
    with torch.device("meta"):
        rank = empty_weights(model, TensorParallelRank(1, 2), torch.device("meta"), torch.bfloat16, on_cpu=True)
    assert rank.layer_shapes == (LayerShape(64, 1, 576, latent=512),) * 4


@pytest.mark.parametrize("further", [(), (CacheGroup(1, 128),), (CacheGroup(1, is_state=True),)], ids=str)
@pytest.mark.parametrize("longest", [2, 17, 18, 131072])
def test_a_step_after_a_long_prompt_needs_one_block_of_each_group(
    longest: int, further: tuple[CacheGroup, ...]
) -> None:
    info, kinds = replace(INFO, max_sequence_length=longest), (CacheGroup(1), *further)
    table = SequenceTable(info, kinds)
    assert not table.apply(deep_step(info, kinds))
    [row] = table.rows().others
    assert (row.start, row.length, row.samples) == ({17: 0, 18: 16}.get(longest, min(longest - 2, 4096)), 1, True)
