"""Does the torch engine say on a GPU what transformers says in float32? Engine alone, no HTTP.

python -m text_generation_bench.check_gpu --model FOLDER                        computes the reference on the CPU first
python -m text_generation_bench.check_gpu --model FOLDER --make-reference FILE  only that, to be carried to where the GPU is
python -m text_generation_bench.check_gpu --model FOLDER --reference FILE

64 prompts, three quarters of them chats under the model's template, the others raw text. Checked are

    logits    ‖engine − reference‖ / ‖reference‖ over all positions of all prompts (of 1024 tokens of the vocabulary, drawn once),
              and the share of positions, and of prompts' last positions, at which both have the same token on top
    texts     64 greedy tokens of each prompt: those of the reference, and those of the engine alone against those in a
              batch of all slots, in chunks, preempted and resumed, on a prefix that another sequence computed

Rounding decides where two tokens are nearly as probable. So texts need not be identical: where two first differ, the engine is asked for
the log-probabilities of both tokens after the text they share, and the gap between the two says whether it was a tie.
The exit code is 0 if all is within the bars, which are options.
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

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import WarmUpLimits
from text_generation_shard.engines.torch.build import build_torch_engine
from text_generation_shard.engines.torch.engine import TorchEngine
from text_generation_shard.engines.torch.executor import Executor, Launched
from text_generation_shard.step.steady import StepRows

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
    """What transformers says in float32; one entry a prompt."""

    prompts: list[list[int]]
    columns: Tensor
    """[COLUMNS] ids of the tokens whose logits are kept."""
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


@dataclass
class Recorder:
    """Stands before the engine's executor and compares the logits of prompts with the reference's, step by step."""

    inner: Executor
    reference: Reference
    by_prompt: dict[tuple[int, ...], int]
    seen: Comparison = field(default_factory=Comparison)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def launch(self, rows: StepRows, *, greedy: bool) -> Launched:
        launched = self.inner.launch(rows, greedy=greedy)
        for row, places in launched.prefills:
            prompt = tuple(row.sequence.tokens[: row.start + row.length])
            for offset, first, length in places:
                for at in range(0, length, POSITIONS_AT_ONCE):
                    count = min(POSITIONS_AT_ONCE, length - at)
                    logits = self.inner.logits(launched.hidden, offset + at, offset + at + count)
                    self._compare(self.by_prompt[prompt], first + at, logits.float())
        return launched

    def _compare(self, index: int, first: int, logits: Tensor) -> None:
        places = slice(first, first + len(logits))
        expected = self.reference["logits"][index][places].to(logits.device).double()
        columns = self.reference["columns"].to(logits.device)
        same = logits.argmax(-1).cpu() == self.reference["tops"][index][places]
        self.seen.error += float((logits[:, columns].double() - expected).square().sum())
        self.seen.norm += float(expected.square().sum())
        self.seen.agree += int(same.sum())
        self.seen.positions += len(same)
        if places.stop == len(self.reference["prompts"][index]):
            self.seen.last_agree += int(same[-1])
            self.seen.last += 1


def main() -> int:
    """Print a table; 1 if something is beyond its bar."""
    options = _options()
    if options.make_reference:
        torch.save(make_reference(options.model), options.make_reference)
        print(f"{options.make_reference}: {options.make_reference.stat().st_size / 2**20:.1f} MiB")
        return 0
    reference: Reference = torch.load(options.reference) if options.reference else make_reference(options.model)
    for part in ("prompts", "logits", "tops", "texts"):
        reference[part] = reference[part][:: options.every]
    config = ShardConfig(engine="torch", model_path=str(options.model), device=options.device, dtype=options.dtype)
    engine = cast(TorchEngine, build_torch_engine(config))
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
    """Runs them, prints a line for each."""

    def __init__(self, engine: TorchEngine, reference: Reference, options: argparse.Namespace) -> None:
        self.passed = True
        self._engine = engine
        self._options = options
        self._reference = reference
        self._prompts = reference["prompts"]
        limits = WarmUpLimits(max_batch_total_tokens=options.kv_tokens)
        self._driver = Driver(engine, engine.warm_up(limits))

    def logits(self) -> None:
        """Every position of every prompt, in steps of many prompts."""
        by_prompt = {tuple(prompt): index for index, prompt in enumerate(self._prompts)}
        executor = self._engine._executor  # there is no public way to a whole vocabulary's logits
        recorder = Recorder(executor, self._reference, by_prompt)
        self._engine._executor = cast(Executor, recorder)
        with torch.inference_mode():
            self._run(self._prompts, new=1)
        self._engine._executor = executor
        seen, options = recorder.seen, self._options
        self._line(
            "logits, relative error", f"{seen.relative_error:.2e}", good=seen.relative_error <= options.max_error
        )
        agreement = seen.agree / seen.positions
        text = f"{agreement:.2%} of {seen.positions} positions"
        self._line("logits, same token on top", text, good=agreement >= options.min_agreement)
        # Of so few, one more or less says little: it is bounded by what two standard deviations would allow.
        slack = 2 * (options.min_agreement * (1 - options.min_agreement) / seen.last) ** 0.5
        agreement = seen.last_agree / seen.last
        text = f"{seen.last_agree} of {seen.last} prompts"
        self._line("logits, same next token", text, good=agreement >= options.min_agreement - slack)

    def texts(self) -> None:
        """However the steps are put together."""
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
        """As many at once as there are slots, prompts whole or in chunks, no more of them in a step than the engine suggests."""
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
        """Whether a sequence whose first chunk has so many tokens has to wait for the next step."""
        held = self._driver.streams.values()
        chunks = sum(min(stream.chunk, stream.to_prefill) for stream in held)
        info = self._engine.info
        return len(held) == info.max_slots or (chunks > 0 and chunks + tokens > info.suggested_prefill_tokens)

    def _preempted(self) -> list[list[int]]:
        """In tens; each is dropped midway, one at a step, and goes on from what it had."""
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
        """Each prompt computed once for its blocks; then all at once, on all the full blocks but their last token's."""
        texts: list[list[int]] = []
        for prompt in self._prompts:
            first = self._driver.admit(prompt, 1, granted=len(prompt) + NEW_TOKENS)
            while not first.tokens:
                self._driver.step()
            count = (len(prompt) - 1) // BLOCK
            # They went back to the far end of the driver's free list, where nobody takes them before the second comes.
            shared = first.blocks[:count]
            second = self._driver.admit(prompt, NEW_TOKENS, shared=shared, computed_tokens=BLOCK * count)
            self._driver.run()
            texts.append(second.tokens)
        return texts

    def _compare(
        self, name: str, prompts: Sequence[list[int]], ours: Sequence[list[int]], others: Sequence[list[int]]
    ) -> None:
        """How many are identical, and the largest gap where two first differ."""
        gaps = [
            self._gap(prompt, one, other)
            for prompt, one, other in zip(prompts, ours, others, strict=True)
            if one != other
        ]
        same = len(ours) - len(gaps)
        text = f"{same} of {len(ours)} identical"
        if gaps:
            text += f"; gap where they part: median {sorted(gaps)[len(gaps) // 2]:.3f}, largest {max(gaps):.3f}"
        self._line(name, text, good=max(gaps, default=0.0) <= self._options.tie)

    def _gap(self, prompt: list[int], one: list[int], other: list[int]) -> float:
        """|difference of the log-probabilities| of the first two tokens in which the texts differ, by the engine alone."""
        at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            return float("inf")  # one of them ended too early
        stream = self._driver.admit([*prompt, *one[:at]], 1, top_n=20)
        self._driver.run()
        top = dict(zip(stream.top_tokens[0].token_ids, stream.top_tokens[0].logprobs, strict=True))
        return abs(top[one[at]] - top[other[at]]) if one[at] in top and other[at] in top else float("inf")

    def _line(self, name: str, text: str, *, good: bool) -> None:
        self.passed &= good
        print(f"{'ok  ' if good else 'FAIL'} {name:<28} {text}", flush=True)


def make_reference(model: Path) -> Reference:
    """Prompts, logits and greedy texts, by transformers in float32 on the CPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [list(prompt) for prompt in _prompts(tokenizer)]
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    decoder.generation_config.eos_token_id = None
    columns = torch.randperm(decoder.config.vocab_size, generator=torch.Generator().manual_seed(0))[:COLUMNS]
    reference = Reference(prompts=prompts, columns=columns, logits=[], tops=[], texts=[])
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            logits = decoder(ids).logits[0]
            reference["logits"].append(logits[:, columns].half())
            reference["tops"].append(logits.argmax(-1))
            mask = torch.ones_like(ids)
            out = decoder.generate(  # type: ignore[misc]
                ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
            )
            reference["texts"].append(out[0, len(prompt) :].tolist())
    return reference


def _prompts(tokenizer: object) -> Iterable[Sequence[int]]:
    """The same for a tokenizer every time; no two are alike."""
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
    add("--device", default="cuda")
    add("--dtype", default="bfloat16")
    add("--make-reference", type=Path, help="write the reference to this file, and end")
    add("--reference", type=Path, help="a file that --make-reference wrote")
    add("--every", type=int, default=1, help="take every n-th prompt alone, for a quick look")
    add("--kv-tokens", type=int, default=1 << 17, help="tokens of the KV pool")
    add("--max-error", type=float, default=1e-2, help="bar of the logits' relative error")
    add("--min-agreement", type=float, default=0.97, help="bar of the share of positions with the same token on top")
    add("--tie", type=float, default=0.25, help="bar of the gap in log-probability that rounding may turn over")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
