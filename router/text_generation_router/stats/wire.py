"""The methods of the statistics, and a sample as bytes."""

import struct

from text_generation_router.dashboard.state import Sample

COUNTS, METRICS, SAMPLE, HISTORY = "counts", "metrics", "sample", "history"
"""Methods: the snapshot of a worker; /metrics; a sample of the dashboard that is younger than a TIME; its
last hour."""
TIME = struct.Struct("<d")
_HEAD = struct.Struct("<dI")
"""The time of a sample and the length of its common part, which is followed by the full one."""


def sample_to_bytes(sample: Sample) -> bytes:
    return _HEAD.pack(sample.at, len(sample.common)) + sample.common + sample.full


def sample_from_bytes(body: bytes) -> Sample:
    at, length = _HEAD.unpack_from(body)
    return Sample(at, body[_HEAD.size : _HEAD.size + length], body[_HEAD.size + length :])
