"""Comparison of a shard's description of itself with another: may it take the other's place?"""

from text_generation_proto.v1 import shard_pb2 as pb

FIELDS = (
    *("engine", "model_id", "model_type", "vocab_size", "max_sequence_length", "block_size", "eos_token_ids"),
    *("scheduling", "max_top_n_tokens", "grammar_kinds"),
)
"""Fields of InfoResponse that requests depend on."""


def difference(info: pb.InfoResponse, expected: pb.InfoResponse) -> str | None:
    """Return why requests prepared for `expected` cannot run on the shard that `info` describes; None if they can."""
    for name in FIELDS:
        mine, other = getattr(info, name), getattr(expected, name)
        if mine != other:
            return f"its {name} is {mine!r}, not {other!r}"
    if info.max_images < expected.max_images:
        return f"it takes {info.max_images} images, not {expected.max_images}"
    known = {capability.field for capability in expected.unsupported}
    for capability in info.unsupported:
        if capability.field not in known:
            return f"it does not support {capability.field}, which requests may use: {capability.reason}"
    return None
