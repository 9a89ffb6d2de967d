"""Compares tiny random models of many families on a GPU with transformers in float32. Runs the engine alone, without HTTP.

python -m text_generation_bench.check_families                                 native where there is a native model
python -m text_generation_bench.check_families --model-impl transformers gemma3_text gpt_oss

Checks what `check_gpu` checks. The weights are random, so many tokens are nearly equally probable: see the gaps of the ties.
Beside our error stands that of transformers itself with the same weights and dtype on the same device: rounding alone costs as
much, in a mixture of experts most, where it may choose other experts. The exit code is 0 if each family is within the limits, or
at least not further from float32 than transformers.

FlashInfer compiles for a minute when it first meets a head size, with windows or without; `--head-dim 96` needs no FlashInfer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel

from text_generation_bench.check_gpu import Checks, Comparison, Reference, reference_of
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from model_families import FAMILIES, conditioned, random_model, tiny_config, write_model  # type: ignore[import-not-found]

PROMPTS = 24
SAME_ROUNDING = 1.25
"""Two errors of which neither is more than this times the other may come from rounding alone: few tokens with other experts
make up most of them."""


def main() -> int:
    """Print a table per family; return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("families", nargs="*", help="default: all that `make test` runs")
    add("--model-impl", default="auto", choices=("auto", "native", "transformers"))
    add("--device", default="cuda")
    add("--dtype", default="bfloat16")
    add("--head-dim", type=int, default=64, help="size of the heads of models that do not derive it")
    add("--changes", type=json.loads, default={}, help="JSON object: changed fields of the configs")
    add("--texts", action="store_true", help="check texts too, not only logits")
    add("--max-error", type=float, default=2e-2, help="limit of the relative error of the logits")
    add("--min-agreement", type=float, default=0.9, help="minimum share of positions with the same top token")
    add("--tie", type=float, default=0.25, help="largest gap in log-probability that counts as a tie")
    options = parser.parse_args()
    options.kv_tokens = 1 << 13
    default = [name for name, family in FAMILIES.items() if family.always]
    results = [check(name, argparse.Namespace(**vars(options))) for name in options.families or default]
    return 0 if all(results) else 1


def check(family: str, options: argparse.Namespace) -> bool:
    """Run the checks of one family; return True if all are within the limits."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, family)
        changes = {"head_dim": options.head_dim, **FAMILIES[family].changes, **options.changes}
        model = conditioned(random_model(tiny_config(family, changes))).to(getattr(torch, options.dtype))
        write_model(model, folder)
        random.seed(7)
        prompts = [[random.randrange(3, 100) for _ in range(8 + 3 * index)] for index in range(PROMPTS)]
        reference = reference_of(folder, prompts, texts=options.texts, dtype=torch.float32)
        own = error_of_library(model.to(options.device), reference)
        print(f"{family}: transformers itself {own.relative_error:.2e}, same top token {own.agreement:.2%}", flush=True)
        options.max_error = max(options.max_error, SAME_ROUNDING * own.relative_error)
        options.min_agreement = min(options.min_agreement, own.agreement)
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
            print(f"FAIL refused: {error}")
            return False
        print(f"     {type(engine).__name__}, {engine.info.dtype} on {engine.info.device}", flush=True)
        checks = Checks(engine, reference, options)
        checks.logits()
        if options.texts:
            checks.texts()
        engine.close()
        return checks.passed


@torch.inference_mode()
def error_of_library(model: PreTrainedModel, reference: Reference) -> Comparison:
    """Compare transformers' own logits with the reference."""
    found = Comparison()
    for index, prompt in enumerate(reference["prompts"]):
        logits = model(torch.tensor([prompt], device=model.device)).logits[0]
        found.add(reference, index, 0, logits.float())
    return found


if __name__ == "__main__":
    sys.exit(main())
