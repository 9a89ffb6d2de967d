"""Comparison and merging of the capabilities of shards."""

from __future__ import annotations

from text_generation_proto.description import difference
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import GrammarKind
from text_generation_router.shards.join import ReplicaInfo, merge_capabilities


def a_shard(engine: str = "tensorrt-llm", **unsupported: str) -> ReplicaInfo:
    info = pb.InfoResponse(
        engine=engine,
        vocab_size=100,
        unsupported=[pb.Unsupported(field=name, reason=reason) for name, reason in unsupported.items()],
    )
    return ReplicaInfo(info, pb.WarmUpResponse(num_blocks=7, block_size=32))


def test_requests_are_prepared_for_all_that_any_replica_lacks() -> None:
    first = a_shard(min_p="old")
    whole = merge_capabilities([None, first, None, a_shard(seed="none", min_p="older"), a_shard()])
    assert first.unsupported == {"min_p": "old"}, "the inputs do not change"
    assert whole.unsupported == {"min_p": "old", "seed": "none"}
    assert (whole.info.engine, whole.info.vocab_size, whole.pool.num_blocks) == ("tensorrt-llm", 100, 7)


def test_a_shard_with_no_fewer_capabilities_may_replace_another() -> None:
    others = merge_capabilities([a_shard(min_p="old"), a_shard(seed="none")])
    for one in (a_shard(), a_shard(seed="other words"), a_shard(min_p="old", seed="none")):
        assert difference(one.info, others.info) is None


def test_a_shard_with_fewer_capabilities_or_another_engine_may_not() -> None:
    why = difference(a_shard(seed="the sampler has none").info, a_shard(min_p="old").info)
    assert why == "it does not support seed, which requests may use: the sampler has none"
    assert difference(a_shard("echo").info, a_shard().info) == "its engine is 'echo', not 'tensorrt-llm'"
    images, none = a_shard(), a_shard()
    images.info.max_images = 4
    assert difference(images.info, none.info) is None
    assert difference(none.info, images.info) == "it takes 0 images, not 4"
    assert merge_capabilities([images, none]).info.max_images == 0


def test_unknown_grammar_kinds_are_ignored() -> None:
    kinds = [pb.GRAMMAR_KIND_REGEX, pb.GRAMMAR_KIND_JSON_SCHEMA, pb.GRAMMAR_KIND_UNSPECIFIED]
    assert ReplicaInfo(pb.InfoResponse(grammar_kinds=kinds), pb.WarmUpResponse()).grammar_kinds == {
        GrammarKind.REGEX,
        GrammarKind.JSON_SCHEMA,
    }
