"""Speed of the torch engine alone, without router and gRPC.

python -m text_generation_bench.engine MODEL_FOLDER
python -m text_generation_bench.engine MODEL_FOLDER --load-format dummy --prompt 512 --new 128 --sequences 1 32 128 256
python -m text_generation_bench.engine MODEL_FOLDER --load-format dummy --sequences 1 32 128 --adapters 8 --rank 16
python -m text_generation_bench.engine MODEL_FOLDER --load-format dummy --sequences 1 4 16 64 256 --speculate 3 --synthetic-acceptance 2.6
python -m text_generation_bench.engine mimo-7b --sequences 1 4 16 --speculate 3 --synthetic-acceptance 2.6
python -m text_generation_bench.engine llama-8b --speculator llama-8b-eagle --sequences 1 4 16 --speculate 3 --synthetic-acceptance 2.6

The last three repeat each run without drafts, in turns. A model, or a draft model, may be a shape of gpu_server.py, with random weights.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from text_generation_bench.gpu_server import SHAPES, shaped_folder
from text_generation_bench.random_adapters import write_adapters
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import Sampling, Stopping, WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, NewSequence, Orders
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.step.drafts.drafter import Drafter

ROUNDS = 3


@dataclass
class Run:
    """Timings of one run, from the first admission to the last token."""

    seconds: float = 0.0
    prefill_seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Seconds between the results of two steps that returned a token for every sequence."""


def run(
    engine: Engine,
    sequences: int,
    prompt_tokens: int,
    new_tokens: int,
    groups: Sequence[CacheGroup] = (CacheGroup(0),),
    adapters: Sequence[str] = ("",),
    sampling: Sampling = Sampling(),
) -> Run:
    """Run all sequences, each with the next of `adapters`; prompts are computed in steps of the suggested number of tokens.

    The seed of `sampling` chooses the prompts, too.

    Sequences share blocks of window groups that have too few for all: this takes no less time.
    """
    blocks = -(-(prompt_tokens + new_tokens) // engine.info.block_size)
    draw = random.Random(f"{sampling.seed} {sequences}")
    admissions = tuple(
        NewSequence(
            slot=slot,
            prompt=tuple(draw.randrange(engine.info.vocab_size) for _ in range(prompt_tokens)),
            stopping=Stopping(max_new_tokens=new_tokens),
            sampling=replace(sampling, seed=(sampling.seed or 0) * sequences + slot),
            blocks=tuple(own),
            further_blocks=tuple(
                (0, (slot,) if group.is_state else tuple(block % group.num_blocks for block in own))
                for group in groups[1:]
            ),
            adapter=adapters[slot % len(adapters)],
        )
        for slot, own in ((slot, range(slot * blocks, (slot + 1) * blocks)) for slot in range(sequences))
    )
    at_once = max(1, engine.info.suggested_prefill_tokens // prompt_tokens)
    done, number, outcome = 0, 0, Run()
    started = last = time.perf_counter()
    while True:
        starting = admissions[done : done + at_once]
        done += len(starting)
        number += 1
        chunks = tuple((admission.slot, prompt_tokens) for admission in starting)
        engine.apply(Orders(number=number, placements=starting, prefill=chunks))
        if (result := engine.step()) is None:
            break
        now = time.perf_counter()
        if len(result.slots) == sequences and not result.prefilled:
            outcome.gaps.append(now - last)
        elif not outcome.gaps:
            outcome.prefill_seconds = now - started
        last = now
    outcome.seconds = last - started
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--trace", default="")
    parser.add_argument("--prompt", type=int, default=30)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 48])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--adapters", type=int, default=0, help="random LoRA adapters; each run is repeated with them")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--adapt-vocabulary", action="store_true", help="the adapters change the embedding and the LM head too"
    )
    parser.add_argument(
        "--speculate", default="0", help="as the flag of the shard; each run is repeated without drafts"
    )
    parser.add_argument(
        "--drawn", action="store_true", help="draw tokens: greedy texts of random weights repeat themselves"
    )
    parser.add_argument("--synthetic-acceptance", type=float, default=0.0)
    parser.add_argument("--speculator", default="", help="a draft model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if {args.model, args.speculator} & SHAPES.keys():
            args.load_format = "dummy"
        args.model, args.speculator = (
            str(shaped_folder(each, Path(), Path(folder, each))) if each in SHAPES else each
            for each in (args.model, args.speculator)
        )
        sizes = args.adapters, args.rank
        measure(args, write_adapters(Path(args.model), Path(folder), *sizes, vocabulary=args.adapt_vocabulary))


def measure(args: argparse.Namespace, adapters: str) -> None:
    started = time.perf_counter()
    engine = build_engine(
        ShardConfig(
            engine="torch",
            model_path=args.model,
            load_format=args.load_format,
            dtype=args.dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            device=args.device,
            trace_steps=args.trace,
            lora_adapters=adapters,
            speculate=args.speculate,
            speculator=args.speculator,
            synthetic_acceptance=args.synthetic_acceptance,
        )
    )
    loaded = time.perf_counter()
    groups = engine.warm_up(WarmUpLimits())
    warm = time.perf_counter()
    print(
        f"loaded in {loaded - started:.1f} s, warm-up {warm - loaded:.1f} s, {groups[0].num_blocks} KV blocks, "
        f"{engine.info.dtype} on {engine.info.device}"
    )
    drafter = engine.drafter if isinstance(engine, TorchEngine) else None
    variants: list[tuple[str, Sequence[str], Drafter | None]] = [("", ("",), None)]
    if engine.info.adapters:
        variants.append((f"with {len(engine.info.adapters)} adapters", engine.info.adapters, None))
    if drafter is not None:
        variants.append(("with drafts", ("",), drafter))
    for sequences in args.sequences:
        runs: list[list[Run]] = [[] for _ in variants]
        for seed in range(
            args.rounds
        ):  # in turns; other prompts in each round, or drafts would be found in earlier outputs
            sampling = Sampling(greedy=not args.drawn, seed=seed)
            for outcomes, (_, names, active) in zip(runs, variants, strict=True):
                if isinstance(engine, TorchEngine):
                    engine.drafter = active
                outcomes.append(run(engine, sequences, args.prompt, args.new, groups, names, sampling))
        for outcomes, (name, _, _) in zip(runs, variants, strict=True):
            best = min(outcomes, key=lambda outcome: outcome.seconds)
            gap = statistics.median(best.gaps) * 1e3 if best.gaps else float("nan")
            speed = sequences * args.new / best.seconds
            decoding = [(each.seconds - each.prefill_seconds) for each in (best, min(runs[0], key=lambda x: x.seconds))]
            share = f", {decoding[1] / decoding[0]:.3f} × {name}" if name else ""
            print(
                f"{sequences:4} sequences: {speed:8.1f} tokens/s, decoding step {gap:7.3f} ms, "
                f"{len(best.gaps)} of them, prompts in {best.prefill_seconds * 1e3:7.1f} ms{share}",
                flush=True,
            )
    engine.close()


if __name__ == "__main__":
    main()
