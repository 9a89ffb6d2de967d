"""Compares tiny random models of many families on a GPU with transformers in float32. Runs the engine alone, without HTTP.

python -m text_generation_bench.check_families                                 native where there is a native model
python -m text_generation_bench.check_families --model-impl transformers gemma3_text gpt_oss

Checks what `check_gpu` checks. The weights are random, so many tokens are nearly equally probable: see the gaps of the ties.
The exit code is 0 if all families are within the limits.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import cast

import torch

from text_generation_bench.check_gpu import Checks, reference_of
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine import TorchEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from model_families import FAMILIES, random_model, tiny_config, write_model  # type: ignore[import-not-found]

PROMPTS = 24
KERNEL_SIZES = {"head_dim": 64}
"""Sizes that the kernels have and the smallest models lack."""


def main() -> int:
    """Print a table per family; return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("families", nargs="*", help="default: all that `make test` runs")
    add("--model-impl", default="auto", choices=("auto", "native", "transformers"))
    add("--device", default="cuda")
    add("--dtype", default="bfloat16")
    add("--texts", action="store_true", help="check texts too, not only logits")
    add("--max-error", type=float, default=2e-2, help="limit of the relative error of the logits")
    add("--min-agreement", type=float, default=0.9, help="minimum share of positions with the same top token")
    add("--tie", type=float, default=0.25, help="largest gap in log-probability that counts as a tie")
    options = parser.parse_args()
    options.kv_tokens = 1 << 13
    default = [name for name, family in FAMILIES.items() if family.always]
    results = [check(name, options) for name in options.families or default]
    return 0 if all(results) else 1


def check(family: str, options: argparse.Namespace) -> bool:
    """Run the checks of one family; return True if all are within the limits."""
    print(f"{family}: ", end="", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, family)
        changes = {**KERNEL_SIZES, **FAMILIES[family].changes}
        model = random_model(tiny_config(family, changes)).to(getattr(torch, options.dtype))
        write_model(model, folder)
        random.seed(7)
        prompts = [[random.randrange(3, 100) for _ in range(8 + 3 * index)] for index in range(PROMPTS)]
        reference = reference_of(folder, prompts, texts=options.texts, dtype=torch.float32)
        config = ShardConfig(
            engine="torch",
            model_path=str(folder),
            device=options.device,
            dtype=options.dtype,
            model_impl=options.model_impl,
            max_batch_size=32,
        )
        try:
            engine = cast(TorchEngine, build_engine(config))
        except EngineError as error:
            print(f"refused: {error}")
            return False
        print(f"{type(engine).__name__}, {engine.info.dtype} on {engine.info.device}", flush=True)
        checks = Checks(engine, reference, options)
        checks.logits()
        if options.texts:
            checks.texts()
        engine.close()
        return checks.passed


if __name__ == "__main__":
    sys.exit(main())
