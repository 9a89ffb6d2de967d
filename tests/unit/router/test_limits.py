"""Limits of requests from the settings and the capabilities of the engine."""

from __future__ import annotations

import pytest

from text_generation_common.exit_codes import CannotServe
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.config import RouterConfig
from text_generation_router.serve.http import resolve_limits
from text_generation_router.serve.shards import check_honoured
from text_generation_router.shards.join import ReplicaInfo


def a_shard(*unsupported: str, tops: int = 3) -> ReplicaInfo:
    info = pb.InfoResponse(
        vocab_size=100,
        max_sequence_length=1000,
        max_top_n_tokens=tops,
        unsupported=[pb.Unsupported(field=name, reason=f"no {name} here") for name in unsupported],
    )
    return ReplicaInfo(info, pb.WarmUpResponse(num_blocks=10, block_size=16))


def test_limits_say_what_the_engine_cannot_honour() -> None:
    limits = resolve_limits(RouterConfig(), a_shard("seed", "min_p"))
    assert limits.unsupported == {"seed": "no seed here", "min_p": "no min_p here"}
    assert (limits.max_total_tokens, limits.max_top_n_tokens, limits.vocab_size) == (160, 3, 100)


def test_the_dialects_have_limits_of_their_own_unless_the_operator_sets_one() -> None:
    for asked, expected in ((None, (5, 20)), (7, (7, 7)), (0, (0, 0)), (30, (25, 25))):
        limits = resolve_limits(RouterConfig(max_top_n_tokens=asked), a_shard(tops=25))
        assert (limits.max_top_n_tokens, limits.max_top_logprobs) == expected


def test_where_there_are_no_top_tokens_the_reason_is_told_and_not_a_limit_of_none() -> None:
    assert resolve_limits(RouterConfig(max_top_n_tokens=5), a_shard("top_n", tops=0)).max_top_n_tokens == 5


def test_the_operator_may_refuse_all_log_probabilities() -> None:
    limits = resolve_limits(RouterConfig(token_logprobs="never"), a_shard("seed"))
    assert limits.unsupported.keys() == {"seed", "tokens", "top_n", "prompt", "prompt_top_n"}
    assert resolve_limits(RouterConfig(token_logprobs="always"), a_shard()).always_logprobs


def test_tenants_that_are_to_be_kept_apart_need_an_engine_that_does() -> None:
    apart = RouterConfig(prefix_cache_per_tenant=True)
    check_honoured(apart, a_shard("seed"))
    check_honoured(RouterConfig(), a_shard("cache_salt"))
    with pytest.raises(CannotServe) as refused:
        check_honoured(apart, a_shard("cache_salt"))
    message = "`prefix_cache_per_tenant` is not supported by this engine: no cache_salt here"
    assert str(refused.value) == message


def test_two_roles_need_a_host_cache_and_a_replica_for_each() -> None:
    two = RouterConfig(prefill_replicas=1, shard_address=("a:1", "b:1"))
    shard = a_shard()
    with pytest.raises(CannotServe, match="`prefill_replicas` moves sequences by way of a host cache"):
        check_honoured(two, shard)
    shard.pool.host_cache = "host"
    check_honoured(two, shard)
    for settings in (
        {"prefill_replicas": 2, "shard_address": two.shard_address},
        {"prefill_replicas": 1, "shards": "a:1"},
    ):
        with pytest.raises(ValueError, match="`prefill_replicas`"):
            RouterConfig.of(**settings)


def test_http_workers_without_their_launcher_are_refused() -> None:
    with pytest.raises(ValueError, match="text-generation-launcher"):
        RouterConfig.of(http_workers=2)
