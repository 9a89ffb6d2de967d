"""Throughput and latency of the torch engine on a GPU, over HTTP, compared with the memory bandwidth of the device.

make bench-gpu MODEL=/models/Llama-3.1-8B ARGS="--streams 1,32,128,256"
make bench-gpu ARGS="--shape llama-8b"            random weights with the shape of a Llama-8B
make bench-gpu ARGS="--shape llama-8b --quantization int4"

Starts text-generation-launcher on 127.0.0.1, keeps a number of greedy streams of 512 prompt and 128 new tokens open, and prints
a table. Times are medians unless noted, in ms:

    itl       between two events of a stream, at the client; ttft: to its first event
    device    of a decode step with (nearly) all streams in it, from the step trace; host and gap, in µs, likewise
    floor     of such a step: the bytes of the weights and of the KV cache it reads, divided by the bandwidth of a copy on the same
              device (bytes read and written, measured before the server starts). The cache is that in the middle of the answers.
    itl/floor inter-token latency as a multiple of the floor

    make bench-gpu ARGS="--shape llama-8b --streams 256 --isl 2000 --osl 200 --launcher-args '--kv-cache-dtype fp8_e4m3fn'"

Nothing is drafted unless --launcher-args has --speculate. With --launcher-args "--num-replicas 2", streams are assumed to be spread evenly over the replicas.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from text_generation_bench.gpu_server import QUANTIZATIONS, SHAPES, last_lines, launched, shaped_folder
from text_generation_shard.engines.torch.layers.quantized.choice import projection_itemsize
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig

COPY_BYTES = 4 << 30
COPIES = 20
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Row:
    """A row of the load's table: streams, tokens per second, then ms."""

    streams: int
    tokens_per_s: float
    ttft: tuple[float, float]
    itl: tuple[float, float]
    errors: int
    client: float


def main() -> None:
    """Print the table."""
    options = _options()
    if options.copy_bandwidth:
        print(copy_bandwidth())
        return
    bandwidth = options.bandwidth * 1e9 if options.bandwidth else float(_own_child("--copy-bandwidth"))
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        model, arguments = options.model, ["--max-concurrent-requests", "1024", "--model-impl", options.model_impl]
        # Greedy texts of random weights repeat themselves: their drafts are right, and a step has no floor then.
        arguments += ["--speculate", "0", *shlex.split(options.launcher_args)]
        if options.shape:
            model = shaped_folder(options.shape, options.model, Path(scratch, options.shape), options.quantization)
            arguments += ["--load-format", "dummy"]
        if options.num_shard > 1:
            arguments += ["--num-shard", str(options.num_shard)]
        trace, log = options.trace or Path(scratch, "trace"), Path(scratch, "log")
        config = read_model_config(model)
        traces = trace_files(trace, options.replicas)
        gpus = options.replicas * options.num_shard
        print(f"{options.shape or model.name}, {gpus} GPU(s), a copy moves {bandwidth / 1e12:.2f} TB/s")
        started = time.monotonic()
        with launched(model, [*arguments, "--trace-steps", str(trace)], log) as server:
            print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
            rows, steps = [], []
            for streams in options.streams:
                starts = sizes(traces)
                rows.append(load(options, config, server.url, streams))
                steps.append(read_traces(traces, starts))
        if any(row.errors for row in rows):
            print(f"requests failed; end of the server's log:\n{last_lines(log)}")
    shares = [math.ceil(row.streams / options.replicas) for row in rows]
    floors = [floor_s(options, config, share, bandwidth) for share in shares]
    print_table(rows, shares, steps, floors)
    print_trace([step for some in steps for step in some])


def load(options: argparse.Namespace, config: ModelConfig, url: str, streams: int) -> Row:
    """Run text-generation-benchmark, or another load, at one number of streams."""
    if options.load is not None:
        return other_load(options, config, url, streams)
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        command = [
            sys.executable,
            "-m",
            "text_generation_bench.load",
            "--url",
            url,
            "--dialect",
            "openai",
            "-b",
            str(streams),
        ]
        command += ["-s", str(options.isl), "-d", str(options.osl), "-r", str(options.rounds), "-o", output.name]
        command += ["--processes", str(min(options.procs, streams)), "--vocab-size", str(config.vocab_size)]
        code = subprocess.run(command).returncode
        text = output.read()
    if not text:
        raise SystemExit(f"the load ended with {code}")
    (level,) = json.loads(text)["levels"]
    ttft, itl = (
        (level[name].get("p50", math.nan) * 1e3, level[name].get("p99", math.nan) * 1e3) for name in ("ttft", "itl")
    )
    return Row(streams, level["tokens_per_s"], ttft, itl, level["errors"], level["client"]["cpu"])


def other_load(options: argparse.Namespace, config: ModelConfig, url: str, streams: int) -> Row:
    """Run the program of --load and read the row of its table: streams, requests, tokens/s, TTFT p50 and p99, ITL p50 and p99, a
    column that is not used, errors, events per token, CPU share of the client; times in ms."""
    command = [sys.executable, str(options.load), "--url", url, "--model", "tgi", "--conc", str(streams)]
    command += ["--isl", str(options.isl), "--osl", str(options.osl), "--rounds", str(options.rounds)]
    command += ["--procs", str(options.procs), "--vocab", str(config.vocab_size)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(out, end="", flush=True)
    lines = [line.split() for line in out.splitlines()]
    values = next(line for line in lines if line and line[0] == str(streams))
    _, _, rate, ttft50, ttft99, itl50, itl99, _, errors, _, client = map(float, values)
    return Row(streams, rate, (ttft50, ttft99), (itl50, itl99), int(errors), client)


def trace_files(trace: Path, replicas: int) -> list[Path]:
    """Return the step traces that the launcher's engines write, one per replica."""
    return [trace] if replicas == 1 else [trace.with_name(f"{trace.name}-{replica}") for replica in range(replicas)]


def sizes(files: list[Path]) -> list[int]:
    return [file.stat().st_size for file in files]


def read_traces(traces: list[Path], starts: list[int]) -> list[dict[str, float]]:
    """Return the steps written after `starts`, once the engines have paused and flushed the traces."""
    before: list[int] = []
    while before != (now := sizes(traces)):
        before = now
        time.sleep(0.5)
    return [
        json.loads(line)
        for trace, start in zip(traces, starts, strict=True)
        for line in trace.read_bytes()[start:].splitlines()
    ]


def floor_s(options: argparse.Namespace, config: ModelConfig, streams: int, bandwidth: float) -> float:
    """Return the minimum time of a decode step of `streams` sequences: its memory traffic divided by the bandwidth."""
    size = ELEMENT_BYTES[_flag(options.launcher_args, "--dtype") or config.dtype]
    weights, experts = config.projection_weights, 0.0
    if (mixture := config.experts) is not None:
        # Experts are chosen as if at random, and those without tokens are not read.
        all_experts = sum(mixture.layers) * mixture.count * 3 * config.hidden_size * mixture.inner
        weights -= all_experts
        experts = all_experts * (1 - (1 - mixture.each / mixture.count) ** streams) * size
    layers = weights * projection_itemsize(config.quantization, size) + experts
    # A step reads one embedding row per stream, but the whole LM head, tied or not.
    head = config.vocab_size * config.hidden_size * size
    context = options.isl + options.osl / 2
    read = sum(
        (context if layer.window is None else min(context, layer.window)) * layer.num_kv_heads * layer.head_dim
        for layer in config.attention_layers
    )
    is_fp8 = (_flag(options.launcher_args, "--kv-cache-dtype") or "auto") != "auto"
    states = 0
    if config.states is not None:
        numbers = sum(config.states.layers) * config.states.values * config.states.key_width
        states = numbers * (size if config.states.dtype is None else config.states.dtype.itemsize)
    # Keys and values of all tokens are read; a state is read and written.
    cache = streams * 2 * (read * (1 if is_fp8 else size) + states)
    return float((layers + head + cache) / options.num_shard / bandwidth)


def print_table(rows: list[Row], shares: list[int], steps: list[list[dict[str, float]]], floors: list[float]) -> None:
    """Print one line per load level; `shares` are the streams of one replica."""
    print(
        "\nstreams  tokens/s  ttft50  ttft99   itl50   itl99  device   floor  itl/floor  device/floor  host µs  gap µs"
        "  errors  client"
    )
    for row, share, some, floor in zip(rows, shares, steps, floors, strict=True):
        full = [step for step in some if step["tokens"] == step["rows"] and step["rows"] >= NEARLY_ALL * share]
        device = median(full, "device_us") / 1e3
        print(
            f"{row.streams:7d} {row.tokens_per_s:9.1f} {row.ttft[0]:7.1f} {row.ttft[1]:7.1f} {row.itl[0]:7.2f} "
            f"{row.itl[1]:7.2f} {device:7.2f} {floor * 1e3:7.2f} {row.itl[0] / floor / 1e3:10.2f} "
            f"{device / floor / 1e3:13.2f} {median(full, 'host_us'):8.0f} {median(full, 'gap_us'):7.0f} "
            f"{row.errors:7d} {row.client:7.2f}"
        )


def print_trace(steps: list[dict[str, float]]) -> None:
    """Print decode steps by number of rows, steps with prompts by number of tokens."""
    print("\nsteps                     count  device ms   host µs  gap µs  (medians)")
    _summarise(steps, "decode, rows", lambda step: step["rows"], lambda step: step["tokens"] == step["rows"])
    _summarise(steps, "prefill, tokens", lambda step: step["tokens"], lambda step: step["tokens"] > step["rows"])


def _summarise(
    steps: list[dict[str, float]],
    name: str,
    size: Callable[[dict[str, float]], float],
    selected: Callable[[dict[str, float]], bool],
) -> None:
    """Print a line for each power of two of the sizes."""
    groups: dict[int, list[dict[str, float]]] = {}
    for step in filter(selected, steps):
        groups.setdefault(1 << max(0, int(size(step)) - 1).bit_length(), []).append(step)
    for top, some in sorted(groups.items()):
        print(
            f"{name + f' ≤ {top}':<25} {len(some):6d} {median(some, 'device_us') / 1e3:10.3f} "
            f"{median(some, 'host_us'):9.0f} {median(some, 'gap_us'):7.0f}"
        )


def median(steps: list[dict[str, float]], name: str) -> float:
    """Return the median over the steps that have the field."""
    values = [step[name] for step in steps if name in step]
    return statistics.median(values) if values else float("nan")


def copy_bandwidth() -> float:
    """Return bytes per second, read and written, of a copy on the device; without a GPU, in host memory."""
    import torch  # here, so that the parent process uses no device memory while the server runs

    on_gpu = torch.cuda.is_available()
    source = torch.empty(
        COPY_BYTES if on_gpu else COPY_BYTES >> 4, dtype=torch.uint8, device="cuda" if on_gpu else "cpu"
    )
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(COPIES):
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * source.numel() / best


def _own_child(argument: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "text_generation_bench.gpu", argument], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def _flag(arguments: str, name: str) -> str | None:
    """Return the value of a flag in the launcher's arguments, in either syntax."""
    words = [part for word in shlex.split(arguments) for part in word.split("=", 1)]
    return words[words.index(name) + 1] if name in words else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="folder of the model; with --shape: the model whose tokenizer is used")
    add("--model-impl", choices=("auto", "native", "transformers"), default="auto", help="code that runs the model")
    add("--shape", choices=sorted(SHAPES), help="serve random weights of this shape")
    add("--quantization", choices=sorted(QUANTIZATIONS), help="with --shape: random weights in this format")
    add("--streams", type=lambda text: [int(word) for word in text.split(",")], default=[1, 32, 128, 256])
    add("--isl", type=int, default=512, help="prompt tokens")
    add("--osl", type=int, default=128, help="new tokens")
    add("--rounds", type=int, default=4, help="requests per stream")
    add("--procs", type=int, default=8, help="processes of the load")
    add("--num-shard", type=int, default=1, help="GPUs per replica (tensor parallelism)")
    add("--launcher-args", default="", help="more arguments for the launcher, in one string")
    add("--trace", type=Path, help="keep the step trace in this file; with replicas FILE-0, …")
    add("--load", type=Path, help="another load: a program with arguments and table as read by other_load")
    add("--bandwidth", type=float, default=0.0, help="GB/s of a copy; default: measured")
    add("--copy-bandwidth", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None and not options.copy_bandwidth:
        parser.error("--model is missing")
    options.replicas = int(_flag(options.launcher_args, "--num-replicas") or 1)
    return options


if __name__ == "__main__":
    main()
