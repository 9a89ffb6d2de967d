"""The flags of text-generation-benchmark. docs/flags.md is generated from them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from text_generation_bench.load.arguments import above, body, header, milliseconds, numbers
from text_generation_common.exit_codes import ExitCode

DIALECTS = ("tgi", "openai", "openai-chat", "responses", "anthropic")
LENGTHS = ("fixed", "sharegpt")
ARRIVALS = ("poisson", "constant", "burst")
TGI_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
DEFAULT_LENGTHS = {"fixed": (10, 8), "sharegpt": (1024, 1024)}
"""Prompt and new tokens: those of TGI's command, and the longest of --lengths sharegpt."""
OPEN_LOOP_SECONDS = 30.0
SAMPLING = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "top_n_tokens")


class LoadSettings(argparse.Namespace):
    """The flags, with their types."""

    url: str
    dialect: str
    model: str | None
    api_key: str | None
    header: list[str]
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    insecure: bool
    timeout: float
    batch_size: list[int]
    rate: list[float]
    search_rate: float | None
    target_share: float
    arrival: str
    burst_size: int
    trace: Path | None
    time_scale: float
    runs: int
    requests: int | None
    duration: float | None
    warmups: int
    lengths: str
    sequence_length: int | None
    decode_length: int | None
    dataset: Path | None
    scenario: str | None
    turns: int
    system_length: int
    system_prompts: int
    think_time: float
    tokenizer_name: str | None
    revision: str
    vocab_size: int
    seed: int
    do_sample: bool
    watermark: bool
    extra_body: dict[str, Any]
    ttft_target: float | None
    itl_target: float | None
    tpot_target: float | None
    latency_target: float | None
    processes: int
    output: Path | None
    records: Path | None
    report: Path | None
    compare: list[Path]

    @property
    def prompt_tokens(self) -> int:
        """Length of prompts; the longest with --lengths sharegpt."""
        return self.sequence_length or DEFAULT_LENGTHS[self.lengths][0]

    @property
    def new_tokens(self) -> int:
        """Length of answers; the longest with --lengths sharegpt."""
        return self.decode_length or DEFAULT_LENGTHS[self.lengths][1]

    @property
    def headers(self) -> dict[str, str]:
        """Headers of each request beside those of HTTP itself."""
        pairs = dict(line.split(":", 1) for line in self.header)
        own = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        if self.dialect == "anthropic":
            own |= {"anthropic-version": "2023-06-01"} | ({"x-api-key": self.api_key} if self.api_key else {})
        return own | {name.strip(): value.strip() for name, value in pairs.items()}

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters that were given, by TGI's names."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        return given | {name: True for name in ("do_sample", "watermark") if getattr(self, name)}

    @property
    def targets(self) -> dict[str, float]:
        """Targets of goodput that were given, in seconds."""
        names = ("ttft", "itl", "tpot", "latency")
        given = {name: getattr(self, f"{name}_target") for name in names}
        return {name: value / 1e3 for name, value in given.items() if value is not None}

    def public(self) -> dict[str, Any]:
        """Return the settings for the result file: no key, and of headers the names only."""
        hidden = {"api_key", "compare", "output", "records", "report"}
        values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        values["header"] = [line.split(":", 1)[0] for line in self.header]
        values |= {"sequence_length": self.prompt_tokens, "decode_length": self.new_tokens}
        return {name: value for name, value in values.items() if name not in hidden}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Write one line, without the list of flags."""
        fail(message, ExitCode.USAGE)


def fail(message: str, code: ExitCode = ExitCode.FAILED) -> NoReturn:
    """Write one line to standard error and exit."""
    sys.stderr.write(f"text-generation-benchmark: error: {' '.join(message.split())}\n")
    raise SystemExit(int(code))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its groups are the topics of --help."""
    parser = _Parser(
        prog="text-generation-benchmark",
        description="Measure a streaming text server: throughput, time to first token, time between tokens, goodput.",
        epilog="Numbers may be repeated or joined: -b 1 -b 8, -b 1 8 or -b 1,8. Times between tokens are between events.",
        allow_abbrev=False,
    )
    for topic, add_flags in FLAGS.items():
        add_flags(parser.add_argument_group(topic).add_argument)
    return parser


def _server_flags(add: Any) -> None:  # noqa: ANN401 - add_argument
    add(
        "--url",
        default="http://127.0.0.1:3000",
        help="address of the server, http or https, with a path prefix if any; default: %(default)s",
    )
    add(
        "--dialect",
        choices=DIALECTS,
        default="tgi",
        help="tgi: /generate_stream; openai: /v1/completions; openai-chat: /v1/chat/completions; responses: /v1/responses; "
        "anthropic: /v1/messages; default: %(default)s",
    )
    add("--model", help="value of the field model; default: the first of /v1/models")
    add("--api-key", default=os.environ.get("API_KEY"), help="key sent as Authorization: Bearer; environment: API_KEY")
    add(
        "--header",
        type=header,
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="another header; may be repeated",
    )
    add("--tls-ca", type=Path, metavar="FILE", help="certificates to trust instead of the system's")
    add("--tls-cert", type=Path, metavar="FILE", help="certificate of the client")
    add("--tls-key", type=Path, metavar="FILE", help="its key, unless it is in the same file")
    add("--insecure", action="store_true", help="do not check the server's certificate")
    add(
        "--timeout",
        type=above(0.001, float),
        default=900.0,
        metavar="S",
        help="longest duration of a request, in seconds; default: %(default)g",
    )


def _load_flags(add: Any) -> None:  # noqa: ANN401 - add_argument
    add("-b", "--batch-size", "--concurrency", type=numbers(int), nargs="+", action="extend", metavar="N",
        help=f"closed loop: requests kept open, one level each; default: {','.join(map(str, TGI_BATCH_SIZES))}")  # fmt: skip
    add(
        "-r",
        "--runs",
        type=above(1),
        default=10,
        metavar="N",
        help="closed loop: requests of each open one at a level; default: %(default)s",
    )
    add("--rate", type=numbers(float), nargs="+", action="extend", metavar="R",
        help="open loop: requests a second, sent without waiting for answers; one level each")  # fmt: skip
    add("--search-rate", type=above(0.001, float), metavar="R",
        help="open loop: find the highest rate that holds the targets; begin with R, and double or halve it")  # fmt: skip
    add(
        "--arrival",
        choices=ARRIVALS,
        default="poisson",
        help="times between the requests of --rate; default: %(default)s",
    )
    add(
        "--burst-size",
        type=above(1),
        default=8,
        metavar="N",
        help="requests at once with --arrival burst; default: %(default)s",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="open loop: JSON lines with timestamp, input_length, output_length, maybe hash_ids of blocks",
    )
    add("--time-scale", type=above(1e-9, float), default=1.0, metavar="X",
        help="factor of the trace's timestamps, to seconds: 0.001 for ms, 0.5 to play it twice as fast")  # fmt: skip
    add("--requests", type=above(1), metavar="N", help="requests of a level (chats with --turns), instead of --runs")
    add("--duration", type=above(0.1, float), metavar="S",
        help=f"send requests for so many seconds, without --rate also of chats that have begun; default of --rate: {OPEN_LOOP_SECONDS:g}")  # fmt: skip
    add(
        "-w",
        "--warmups",
        type=above(0),
        default=1,
        metavar="N",
        help="rounds before each level that are not counted; default: %(default)s",
    )
    add(
        "--processes",
        type=above(1),
        default=1,
        metavar="N",
        help="client processes, if one core does not suffice; default: %(default)s",
    )


def _text_flags(add: Any) -> None:  # noqa: ANN401 - add_argument
    add("-t", "--tokenizer-name", default=os.environ.get("TOKENIZER_NAME"), metavar="NAME",
        help="tokenizer for prompts of exact length: a folder, a tokenizer.json, or a model in the local cache of the Hub; "
        "environment: TOKENIZER_NAME. Without: token ids for openai, else one word a token")  # fmt: skip
    add("--revision", default="main", help="revision of the tokenizer in the cache; default: %(default)s")
    add(
        "-s",
        "--sequence-length",
        type=above(1),
        metavar="N",
        help="prompt tokens; default: 10; with --lengths sharegpt the most, default: 1024",
    )
    add(
        "-d",
        "--decode-length",
        type=above(1),
        metavar="N",
        help="new tokens; default: 8; with --lengths sharegpt the most, default: 1024",
    )
    add(
        "--lengths",
        choices=LENGTHS,
        default="fixed",
        help="sharegpt: log-normal, with the means of ShareGPT's chats (161 and 338); default: %(default)s",
    )
    add("--dataset", type=Path, metavar="FILE",
        help="prompts: JSON or JSON lines with prompt, messages or conversations (ShareGPT's file), and maybe output_length")  # fmt: skip
    add("--scenario", choices=("agents",),
        help="sessions of coding agents, -b of them at a time: turns, pauses of tool calls, sub-agents, drawn by --seed or from "
        "--trace, a file or folder of AIPerf's weka_trace; -s is the longest context, default: 200000")  # fmt: skip
    add(
        "--turns",
        type=above(1),
        default=1,
        metavar="N",
        help="turns of a chat; each prompt has the answers before it; default: %(default)s",
    )
    add(
        "--think-time",
        type=above(0, float),
        default=0.0,
        metavar="S",
        help="seconds between an answer and the next turn",
    )
    add(
        "--system-length",
        type=above(0),
        default=0,
        metavar="N",
        help="tokens of a system prompt that requests share; default: %(default)s",
    )
    add("--system-prompts", type=above(1), default=1, metavar="N", help="number of different system prompts")
    add(
        "--vocab-size",
        type=above(300),
        default=30000,
        metavar="N",
        help="token ids of prompts are from 200 up to this; default: %(default)s",
    )
    add(
        "--seed",
        type=above(0),
        default=time.time_ns() % 2**31,
        metavar="N",
        help="seed of prompts and arrivals; default: another one each run",
    )


def _sampling_flags(add: Any) -> None:  # noqa: ANN401 - add_argument
    for name in SAMPLING:
        kind, least = (int, 0) if name in ("top_k", "top_n_tokens") else (float, -100)
        add(
            f"--{name.replace('_', '-')}",
            type=above(least, kind),
            metavar="X" if kind is float else "N",
            help="as in TGI",
        )
    add("--do-sample", action="store_true", help="as in TGI")
    add("--watermark", action="store_true", help="as in TGI")
    add(
        "--extra-body",
        type=body,
        default={},
        metavar="JSON",
        help="more fields of the body; null removes one: '{\"ignore_eos\": null}'",
    )


def _result_flags(add: Any) -> None:  # noqa: ANN401 - add_argument
    add("--ttft-target", type=milliseconds, metavar="MS", help="goodput: longest time to first token, in ms")
    add(
        "--itl-target",
        type=milliseconds,
        metavar="MS",
        help="goodput: longest time between events, held by 99 %% of a request's",
    )
    add("--tpot-target", type=milliseconds, metavar="MS", help="goodput: longest mean time per token after the first")
    add("--latency-target", type=milliseconds, metavar="MS", help="goodput: longest duration of a request")
    add("--target-share", type=above(0.001, float), default=0.99, metavar="X",
        help="share of requests that must hold the targets with --search-rate; default: %(default)g")  # fmt: skip
    add("--records", type=Path, metavar="FILE", help="write each request as a JSON line: its level, times and tokens")
    add("-o", "--output", type=Path, metavar="FILE", help="write settings, environment and times as JSON")
    add("--report", type=Path, metavar="FILE", help="write a page with plots: one HTML file")
    add(
        "--compare",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="measure nothing: compare result files (or show one)",
    )


FLAGS: Mapping[str, Callable[[Any], None]] = {
    "Server": _server_flags,
    "Load": _load_flags,
    "Requests": _text_flags,
    "Sampling": _sampling_flags,
    "Result": _result_flags,
}
"""The flags by topic, as functions that get `add_argument`; docs/flags.md has a table for each."""


def parse_settings(argv: Sequence[str] | None = None) -> LoadSettings:
    """Return the settings. Invalid ones: one line and exit code USAGE."""
    parser = build_parser()
    settings = parser.parse_args(argv, namespace=LoadSettings())
    for name in ("batch_size", "rate"):
        setattr(settings, name, [value for part in getattr(settings, name) or [] for value in part])
    try:
        scheme, host = urlsplit(settings.url)[:2]
    except ValueError as error:
        parser.error(f"argument --url: {error}")
    if scheme not in ("http", "https") or not host:
        parser.error(f"argument --url: must begin with http:// or https://, not {settings.url!r}")
    if "@" in host:
        parser.error("argument --url: a user and a password belong into --header or --api-key")
    modes = [name for name in ("batch_size", "rate", "search_rate", "trace") if getattr(settings, name)]
    _check_scenario(parser, settings, modes)
    if settings.search_rate and not settings.targets:
        parser.error("--search-rate needs a target: --ttft-target, --itl-target, --tpot-target or --latency-target")
    if settings.target_share > 1:
        parser.error("argument --target-share: must be at most 1")
    if len(modes) > 1:
        parser.error(f"only one of {', '.join('--' + name.replace('_', '-') for name in modes)}")
    if settings.api_key and not settings.api_key.isascii():
        parser.error("argument --api-key: must be ASCII")
    if not modes:
        settings.batch_size = list(TGI_BATCH_SIZES)
    for name in ("output", "records", "report"):
        path = getattr(settings, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"argument --{name}: no folder {path.parent}")
    return settings


def _check_scenario(parser: argparse.ArgumentParser, settings: LoadSettings, modes: list[str]) -> None:
    if not settings.scenario:
        return
    if "trace" in modes:  # it names the sessions, not the times
        modes.remove("trace")
    if settings.dialect == "tgi" or settings.dataset or settings.turns > 1:
        parser.error("--scenario needs a dialect with chats (--dialect), and neither --dataset nor --turns")
