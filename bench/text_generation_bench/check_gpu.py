"""Compares the torch engine on a GPU with transformers in float32. Runs the engine alone, without HTTP.

python -m text_generation_bench.check_gpu --model FOLDER                        computes the reference on the CPU first
python -m text_generation_bench.check_gpu --model FOLDER --make-reference FILE  only computes the reference, for another machine
python -m text_generation_bench.check_gpu --model FOLDER --reference FILE

Uses 64 prompts: three quarters are chats in the model's template, the others raw text. Checks

    logits    ‖engine − reference‖ / ‖reference‖ over all positions of all prompts (of 1024 randomly drawn tokens of the vocabulary),
              and the share of positions, and of last positions, at which both have the same most probable token
    texts     64 greedy tokens per prompt: the engine against the reference, and the engine alone against itself in a batch of
              all slots, in chunks, preempted and resumed, on a prefix that another sequence computed

Rounding decides between tokens of nearly equal probability, so texts need not be identical. Where two texts first differ, the
engine computes the log-probabilities of both tokens after the common text, and the gap between them shows whether it was a tie.
The exit code is 0 if everything is within the limits, which are options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, cast

import torch
from torch import Tensor

from text_generation_proto.values import WarmUpLimits
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.engine.executor import Executor
from text_generation_shard.engines.torch.engine.in_flight import StepInFlight
from text_generation_shard.step.sequence import StepRows

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from engine_driver import Driver, Stream  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[2]
CHATS, RAW_TEXTS = 48, 16
NEW_TOKENS = 64
COLUMNS = 1024
CHUNK = 32
PREEMPTED_AFTER = 20
BLOCK = 16
POSITIONS_AT_ONCE = 64
SUBJECTS = (
    "the water cycle",
    "how a bicycle stays upright",
    "the French Revolution",
    "binary search",
    "sourdough bread",
    "why the sky is blue",
    "photosynthesis",
    "the rules of chess",
    "plate tectonics",
    "how vaccines work",
    "the history of printing",
    "black holes",
)
QUESTIONS = (
    "Explain {} to a child.",
    "List three facts about {}, and say of each why it matters.",
    "Write a short poem about {}.",
    "What do people most often get wrong about {}? Answer in two sentences, then give an example.",
)


class Reference(TypedDict):
    """Results of transformers in float32; one entry per prompt."""

    prompts: list[list[int]]
    columns: Tensor
    """[COLUMNS] ids of the tokens whose logits are stored."""
    logits: list[Tensor]
    """[positions, COLUMNS]"""
    tops: list[Tensor]
    """[positions] most probable token."""
    texts: list[list[int]]


@dataclass
class Comparison:
    """Sums over all positions."""

    error: float = 0.0
    norm: float = 0.0
    agree: int = 0
    positions: int = 0
    last_agree: int = 0
    last: int = 0

    @property
    def relative_error(self) -> float:
        return float((self.error / self.norm) ** 0.5)

    @property
    def agreement(self) -> float:
        """Share of the positions with the same most probable token."""
        return self.agree / self.positions

    def add(self, reference: Reference, index: int, first: int, logits: Tensor) -> None:
        """Compare the logits [positions, vocabulary] from position `first` of a prompt on."""
        positions = slice(first, first + len(logits))
        expected = reference["logits"][index][positions].to(logits.device).double()
        columns = reference["columns"].to(logits.device)
        same = logits.argmax(-1).cpu() == reference["tops"][index][positions]
        self.error += float((logits[:, columns].double() - expected).square().sum())
        self.norm += float(expected.square().sum())
        self.agree += int(same.sum())
        self.positions += len(same)
        if positions.stop == len(reference["prompts"][index]):
            self.last_agree += int(same[-1])
            self.last += 1


@dataclass
class Recorder:
    """Wraps the engine's executor and compares the logits of prompts with the reference, step by step."""

    inner: Executor
    reference: Reference
    by_prompt: dict[tuple[int, ...], int]
    seen: Comparison = field(default_factory=Comparison)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def launch(self, rows: StepRows, *, greedy: bool, adapted: bool = False) -> StepInFlight:
        launched = self.inner.launch(rows, greedy=greedy, adapted=adapted)
        for row, offset in launched.prefills:
            prompt = tuple(row.sequence.tokens[: row.start + row.length])
            for at in range(0, row.length, POSITIONS_AT_ONCE):
                count = min(POSITIONS_AT_ONCE, row.length - at)
                logits = self.inner.logits(launched.output.normed, offset + at, offset + at + count)
                self.seen.add(self.reference, self.by_prompt[prompt], row.start + at, logits.float())
        return launched


def main() -> int:
    """Print a table; return 1 if a check fails."""
    options = _options()
    if options.make_reference:
        torch.save(make_reference(options.model), options.make_reference)
        print(f"{options.make_reference}: {options.make_reference.stat().st_size / 2**20:.1f} MiB")
        return 0
    reference: Reference = torch.load(options.reference) if options.reference else make_reference(options.model)
    for part in ("prompts", "logits", "tops", "texts"):
        reference[part] = reference[part][:: options.every]
    config = ShardConfig(
        engine="torch",
        model_path=str(options.model),
        model_impl=options.model_impl,
        device=options.device,
        dtype=options.dtype,
    )
    engine = cast(TorchEngine, build_engine(config))
    print(
        f"{options.model.name}, {engine.info.dtype} on {engine.info.device}, {len(reference['prompts'])} prompts",
        flush=True,
    )
    checks = Checks(engine, reference, options)
    checks.logits()
    checks.texts()
    engine.close()
    return 0 if checks.passed else 1


class Checks:
    """Runs the checks and prints a line for each."""

    def __init__(self, engine: TorchEngine, reference: Reference, options: argparse.Namespace) -> None:
        self.passed = True
        self._engine = engine
        self._options = options
        self._reference = reference
        self._prompts = reference["prompts"]
        limits = WarmUpLimits(max_batch_total_tokens=options.kv_tokens)
        self._driver = Driver(engine, engine.warm_up(limits))

    def logits(self) -> None:
        """Check the logits of every position, with many prompts per step."""
        by_prompt = {tuple(prompt): index for index, prompt in enumerate(self._prompts)}
        executor = self._engine._executor  # the engine has no public access to the logits of the whole vocabulary
        recorder = Recorder(executor, self._reference, by_prompt)
        self._engine._executor = cast(Executor, recorder)
        with torch.inference_mode():
            self._run(self._prompts, new=1)
        self._engine._executor = executor
        seen, options = recorder.seen, self._options
        self._line(
            "logits, relative error", f"{seen.relative_error:.2e}", good=seen.relative_error <= options.max_error
        )
        text = f"{seen.agreement:.2%} of {seen.positions} positions"
        self._line("logits, same top token", text, good=seen.agreement >= options.min_agreement)
        # With few samples the share varies: the limit is lowered by two standard deviations.
        slack = 2 * (options.min_agreement * (1 - options.min_agreement) / seen.last) ** 0.5
        agreement = seen.last_agree / seen.last
        text = f"{seen.last_agree} of {seen.last} prompts"
        self._line("logits, same next token", text, good=agreement >= options.min_agreement - slack)

    def texts(self) -> None:
        """Check that texts do not depend on the composition of steps."""
        prompts, slots = self._prompts, self._engine.info.max_slots
        alone = [self._run([prompt])[0].tokens for prompt in prompts]
        self._compare("alone, reference", prompts, self._reference["texts"], alone)
        again = [self._run([prompt])[0].tokens for prompt in prompts[:8]]
        self._line(
            "alone, twice", f"{sum(map(list.__eq__, again, alone))} of {len(again)} identical", good=again == alone[:8]
        )
        copies = max(1, slots // len(prompts))
        together = [stream.tokens for stream in self._run(prompts * copies)]
        self._compare(f"alone, batch of {len(together)}", prompts * copies, alone * copies, together)
        chunked = [stream.tokens for stream in self._run(prompts, chunk=CHUNK)]
        self._compare(f"alone, chunks of {CHUNK}", prompts, alone, chunked)
        self._compare("alone, preempted", prompts, alone, self._preempted())
        self._compare("alone, on a shared prefix", prompts, alone, self._on_shared_prefixes())

    def _run(self, prompts: Sequence[Sequence[int]], new: int = NEW_TOKENS, chunk: int = 1 << 30) -> list[Stream]:
        """Run prompts, whole or in chunks, up to the number of slots at once and the suggested prefill tokens per step."""
        streams: list[Stream] = []
        for prompt in prompts:
            while self._is_full(min(chunk, len(prompt))):
                self._driver.step()
            streams.append(self._driver.admit(prompt, new, chunk=chunk))
        self._driver.run()
        for stream in streams:
            if stream.failure is not None:
                raise SystemExit(f"a sequence failed: {stream.failure.message}")
        return streams

    def _is_full(self, tokens: int) -> bool:
        """Return True if a sequence with a first chunk of `tokens` must wait for the next step."""
        held = self._driver.streams.values()
        chunks = sum(min(stream.chunk, stream.to_prefill) for stream in held)
        info = self._engine.info
        return len(held) == info.max_slots or (chunks > 0 and chunks + tokens > info.suggested_prefill_tokens)

    def _preempted(self) -> list[list[int]]:
        """Run prompts in groups of ten; preempt each sequence midway, one per step, and resume it."""
        texts: list[list[int]] = []
        for start in range(0, len(self._prompts), 10):
            streams = [self._driver.admit(prompt, NEW_TOKENS) for prompt in self._prompts[start : start + 10]]
            for _ in range(PREEMPTED_AFTER):
                self._driver.step()
            for index, stream in enumerate(streams):
                streams[index] = self._driver.preempt(stream)
                texts.append(stream.tokens)
                self._driver.step()
            self._driver.run()
            for index, stream in enumerate(streams):
                texts[start + index] = texts[start + index] + stream.tokens
        return texts

    def _on_shared_prefixes(self) -> list[list[int]]:
        """Compute each prompt once, then run it on all its full blocks except the one of the last token."""
        texts: list[list[int]] = []
        for prompt in self._prompts:
            count = (len(prompt) - 1) // BLOCK
            chunk = max(1, BLOCK * count)
            first = self._driver.admit(prompt, 1, allocated=len(prompt) + NEW_TOKENS, chunk=chunk)
            self._driver.step()
            kept = self._driver.keep_state(first) if count and self._driver.has_states else None
            while not first.tokens:
                self._driver.step()
            # The driver appends freed blocks to its free list, so these are not reused before the second sequence.
            shared = first.blocks[:count]
            reused = {"shared": shared, "computed_tokens": BLOCK * count, "checkpoint": kept}
            second = self._driver.admit(prompt, NEW_TOKENS, **reused)
            self._driver.run()
            texts.append(second.tokens)
        return texts

    def _compare(
        self, name: str, prompts: Sequence[list[int]], ours: Sequence[list[int]], others: Sequence[list[int]]
    ) -> None:
        """Check the number of identical texts, and the largest gap where two texts first differ."""
        gaps = [
            self._gap(prompt, text, other)
            for prompt, text, other in zip(prompts, ours, others, strict=True)
            if text != other
        ]
        same = len(ours) - len(gaps)
        text = f"{same} of {len(ours)} identical"
        if gaps:
            text += f"; gap at the first difference: median {sorted(gaps)[len(gaps) // 2]:.3f}, largest {max(gaps):.3f}"
        self._line(name, text, good=max(gaps, default=0.0) <= self._options.tie)

    def _gap(self, prompt: list[int], text: list[int], other: list[int]) -> float:
        """Return |difference of the log-probabilities| of the first two tokens that differ, computed by the engine alone."""
        at = next((i for i, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            return float("inf")  # one of the texts is shorter
        stream = self._driver.admit([*prompt, *text[:at]], 1, top_n=20)
        self._driver.run()
        top = dict(zip(stream.top_tokens[0].token_ids, stream.top_tokens[0].logprobs, strict=True))
        return abs(top[text[at]] - top[other[at]]) if text[at] in top and other[at] in top else float("inf")

    def _line(self, name: str, text: str, *, good: bool) -> None:
        self.passed &= good
        print(f"{'ok  ' if good else 'FAIL'} {name:<28} {text}", flush=True)


def make_reference(model: Path) -> Reference:
    """Compute prompts, logits and greedy texts with transformers in float32 on the CPU."""
    from transformers import AutoTokenizer

    return reference_of(model, [list(prompt) for prompt in _prompts(AutoTokenizer.from_pretrained(model))])


def reference_of(
    model: Path, prompts: list[list[int]], *, texts: bool = True, dtype: torch.dtype = torch.float16
) -> Reference:
    """Compute the logits, kept in `dtype`, and greedy texts of some prompts with transformers in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    decoder.generation_config.eos_token_id = None
    columns = torch.randperm(decoder.config.vocab_size, generator=torch.Generator().manual_seed(0))[:COLUMNS]
    reference = Reference(prompts=prompts, columns=columns, logits=[], tops=[], texts=[])
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            logits = decoder(ids).logits[0]
            reference["logits"].append(logits[:, columns].to(dtype))
            reference["tops"].append(logits.argmax(-1))
            if not texts:
                continue
            mask = torch.ones_like(ids)
            out = decoder.generate(  # type: ignore[misc]
                ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
            )
            reference["texts"].append(out[0, len(prompt) :].tolist())
    return reference


def _prompts(tokenizer: object) -> Iterable[Sequence[int]]:
    """Yield the prompts; they depend only on the tokenizer and are all different."""
    chats = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS][:CHATS]
    for text in chats:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)  # type: ignore[attr-defined]
        yield tokenizer(rendered, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    ids = tokenizer((ROOT / "LICENSE").read_text(encoding="utf-8"))["input_ids"]  # type: ignore[operator]
    for index in range(RAW_TEXTS):
        yield ids[100 * index : 100 * index + 16 + 15 * index]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the model")
    add("--model-impl", choices=("auto", "native", "transformers"), default="auto", help="code that runs the model")
    add("--device", default="cuda")
    add("--dtype", default="bfloat16")
    add("--make-reference", type=Path, help="write the reference to this file and exit")
    add("--reference", type=Path, help="file written by --make-reference")
    add("--every", type=int, default=1, help="use only every n-th prompt")
    add("--kv-tokens", type=int, default=1 << 17, help="tokens of the KV cache")
    add("--max-error", type=float, default=1e-2, help="limit of the relative error of the logits")
    add("--min-agreement", type=float, default=0.97, help="minimum share of positions with the same top token")
    add("--tie", type=float, default=0.25, help="largest gap in log-probability that counts as a tie")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
