"""Metrics of GPUs from the states in reports."""

from __future__ import annotations

from metric_samples import samples

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.metrics.instruments import Registry
from text_generation_router.metrics.steps import MAX_GPUS, THROTTLE_REASONS, GpuMetrics

PREFIX = "text_generation_gpu_"


def test_series_of_the_values_that_are_known() -> None:
    registry = Registry()
    gpus = registry.add(GpuMetrics)
    assert samples(registry) == {}
    known = pb.GpuState(index=3, uuid="GPU-3", utilization=0.5, uncorrected_ecc_errors=0)
    known.throttle_reasons.extend(["gpu_idle", "hw_slowdown"])
    gpus.update(1, [known, pb.GpuState(index=4, uuid='"} 1\n'), pb.GpuState(index=5)])
    labels = 'replica="1",gpu="3",uuid="GPU-3"'
    expected = {
        f"{PREFIX}utilization_ratio{{{labels}}}": 0.5,
        f'{PREFIX}ecc_errors_total{{{labels},kind="uncorrected"}}': 0.0,
    }
    throttled = {
        f'{PREFIX}throttled{{{labels},reason="{reason}"}}': float(reason == "hw_slowdown")
        for reason in THROTTLE_REASONS
    }
    assert samples(registry) == expected | throttled
    gpus.update(1, [pb.GpuState(index=number, uuid=f"GPU-{number}", power_watts=7) for number in range(1000)])
    assert sum(name.startswith(f"{PREFIX}power_watts") for name in samples(registry)) == MAX_GPUS
    gpus.remove(1)
    assert samples(registry) == {}
