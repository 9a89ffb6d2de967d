"""Compiles a part of the kernels of a model: `python -m … PART PARTS`, with settings as JSON on stdin; see compile_ahead.py."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from text_generation_common.lifeline import follow_parent
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.build.compile_ahead import KERNEL, one_of_each_kind
from text_generation_shard.engines.torch.build.native import build_model
from text_generation_shard.engines.torch.build.prepare import Target, prepare
from text_generation_shard.engines.torch.models.native.config import read_model_config


@torch.inference_mode()
def compile_part(config: ShardConfig, part: int, parts: int) -> None:
    """Capture the graphs of one of `parts` parts with a small model; the first part computes the largest step, then all graphs."""
    prepared = prepare(config, read_model_config(Path(config.model_path), config.quantize), Target.of(config))
    builder, runner = build_model(config, replace(prepared, model=one_of_each_kind(prepared.model)), ahead=None)
    if part == 0:
        limits = WarmUpLimits(max_batch_total_tokens=2 * prepared.info.suggested_prefill_tokens)
        builder.engine(runner).warm_up(limits)
    else:
        runner.allocate([1 for _ in runner.kinds])
        runner.capture(part=slice(part, None, parts))


def main() -> None:
    """Compile a part; write a line for each kernel to stdout."""
    settings = sys.stdin.readline()
    follow_parent(sys.stdin.fileno())
    if find_spec("triton") is not None:
        import triton

        triton.knobs.runtime.jit_post_compile_hook = _tell
    compile_part(ShardConfig.model_validate_json(settings), int(sys.argv[1]), int(sys.argv[2]))


def _tell(*, fn: object, **_: object) -> None:
    sys.stdout.write(f"{KERNEL}{getattr(fn, 'name', fn)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
