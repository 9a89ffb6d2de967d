"""Random requests with all that changes tokens, served by engines with and without drafts."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from byte_tokenizer import END
from engine_driver import Driver, Stream
from tiny_transformers import SHAPE

from text_generation_proto.values import Grammar, GrammarKind, Sampling, Stopping
from text_generation_shard.engine import TopTokens
from text_generation_shard.engines.torch.sampling.sampler import SEGMENT, SamplingRow, _log_uniforms, draw_keys

AT_ONCE = 24
"""Requests of a traffic, at least."""
VOCABULARY = SHAPE["vocab_size"]
GRAMMARS = [
    Grammar(GrammarKind.REGEX, r"(abc|[0-9]{2,5}-x){1,4}"),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 6})),
    Grammar(
        GrammarKind.LARK,
        'start: "<call>" /[a-z]{1,8}/ "(" %json {"type": "array", "items": {"type": "integer"}} ")</call>"',
    ),
]
"""Grammars of a pattern, of a schema, and of calls of a tool."""


@dataclass
class Traffic:
    """Random requests, and for each the streams that serve it: several if it is preempted or moved."""

    seed: int
    kind: str
    """"greedy": nothing but the most probable tokens."""
    requests: list[dict[str, object]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    served: list[list[Stream]] = field(default_factory=list)
    predictions: list[tuple[int, ...]] = field(default_factory=list)
    """The predictions of the requests, in order; empty: none has one."""
    accepted: Counter[str] = field(default_factory=Counter)
    """Drafted tokens that were right, by source."""

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        while len(self.requests) < AT_ONCE:
            prompt = [draw.randrange(2, VOCABULARY) for _ in range(draw.choice((1, 5, 16, 40)))] * draw.choice((1, 2))
            several = draw.choice((1, 1, 4))  # the choices of one request
            request = self._request(draw)
            for number in range(several):
                self.prompts.append(prompt)
                sampling = request["sampling"]
                assert isinstance(sampling, Sampling)
                self.requests.append(request | {"sampling": replace(sampling, seed=draw.randrange(1 << 40) + number)})

    def _request(self, draw: random.Random) -> dict[str, object]:
        new = draw.choice((1, 2, 9, 30, 60))
        ends = frozenset({END, *draw.sample(range(VOCABULARY), draw.choice((0, 0, 8)))})
        words = ((40,), (50, 51), tuple(range(60, 63)))
        sampling = Sampling(
            greedy=draw.random() < 0.5,
            temperature=draw.choice((1.0, 0.6)),
            top_k=draw.choice((0, 0, 20)),
            top_p=draw.choice((1.0, 1.0, 0.9)),
            min_p=draw.choice((0.0, 0.0, 0.02)),
            typical_p=draw.choice((1.0, 1.0, 0.95)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.3)),
            frequency_penalty=draw.choice((0.0, 0.0, 0.3)),
            output_frequency_penalty=draw.choice((0.0, 0.0, 0.4)),
            output_presence_penalty=draw.choice((0.0, 0.0, -0.5)),
            watermark=draw.random() < 0.25,
            logit_bias_ids=draw.choice(((), (), (70, 71))),
            logit_bias_values=(),
            bad_words=draw.choice(((), (), words)),
            # A text of two tokens repeats itself, so that its drafts are often right.
            allowed_token_ids=draw.choice(((), (), (), tuple(range(30, 250)), (30, 31))),
        )
        if sampling.logit_bias_ids:
            sampling = replace(sampling, logit_bias_values=(3.0, -2.0))
        if self.kind == "greedy":
            return {"sampling": Sampling(), "stopping": Stopping(new, ends, min_new_tokens=min(2, new - 1))}
        if draw.random() < 0.3:
            sampling = Sampling(greedy=sampling.greedy)
        grammar = draw.choice((None, None, None, *GRAMMARS))
        return {
            "sampling": sampling,
            "stopping": Stopping(new, ends, frozenset({5}), min(draw.choice((0, 0, 4)), new - 1)),
            "top_n": draw.choice((0, 0, 3)),
            "prompt_logprobs": draw.random() < 0.2,
            "chunk": draw.choice((7, 16, 100)),
            "grammar": grammar,
        }

    def run(self, *drivers: Driver, preempt: bool) -> None:
        """Serve the requests; with `preempt`, interrupt some, and continue them with their tokens in the prompt, at any driver."""
        draw = random.Random(self.seed)
        at: list[Driver] = []
        """The driver of each request."""
        for request, prediction in zip(self.requests, self.predictions, strict=False):
            request["prediction"] = prediction
        left = list(zip(self.prompts, self.requests, strict=True))[::-1]
        while left or any(driver.streams for driver in drivers):
            while left and sum(len(driver.streams) for driver in drivers) < 6:
                prompt, request = left.pop()
                at.append(draw.choice(drivers))
                self.served.append([at[-1].admit(prompt, **request)])  # type: ignore[arg-type]
                if draw.random() < 0.5:
                    break
            for index, parts in enumerate(self.served) if preempt and draw.random() < 0.3 else ():
                if len(parts) == 1 and parts[0].tokens and not parts[0].is_over:
                    request = self.requests[index]
                    options = {"top_n": request.get("top_n", 0), "prediction": request.get("prediction", ())}
                    before, at[index] = at[index], draw.choice(drivers)
                    parts.append(before.preempt(parts[-1], at[index], **options))
                    break
            results = [driver.step() for driver in drivers]
            if not any(results) and not left:
                break
            for result in filter(None, results):
                self.accepted.update({told.source: told.accepted_tokens for told in result.drafting})

    def tokens(self, index: int) -> list[int]:
        return [token for part in self.served[index] for token in part.tokens]

    @property
    def texts(self) -> list[list[int]]:
        return [[*prompt, *self.tokens(index)] for index, prompt in enumerate(self.prompts)]

    def check_equal(self, other: Traffic, tolerance: float) -> None:
        """Raise AssertionError unless the other one was served the same.

        Rounding may decide a draw whose two first tokens arrive at one time, and, in one text of a traffic, which tokens are cut off:
        the mass of those before may reach `top_p` or `typical_p` within 1e-8.
        """
        cut = 0
        for index, (mine, its) in enumerate(zip(self.served, other.served, strict=True)):
            if self.tokens(index) != other.tokens(index):
                if not self._raced(index, other):
                    cut += 1
                    assert self.requests[index]["sampling"].cuts, self.requests[index]  # type: ignore[attr-defined]
                    assert cut == 1, self.requests[index]
                continue
            assert mine[-1].finish == its[-1].finish
            failures = [
                stream.failure and (stream.failure.code, stream.failure.message) for stream in (mine[-1], its[-1])
            ]
            assert failures[0] == failures[1]
            for name in ("logprobs", "prompt_logprobs", "top_tokens"):
                values, expected = (_numbers([getattr(part, name) for part in parts]) for parts in (mine, its))
                equal = pytest.approx(expected, abs=tolerance, rel=tolerance, nan_ok=True)
                assert values == equal or self._tied(index, name, values, expected, max(tolerance, 1e-4)), name

    def _raced(self, index: int, other: Traffic) -> bool:
        """Return True if rounding decides the first draw that differs: its two tokens arrive at nearly the same time."""
        sampling = self.requests[index]["sampling"]
        assert isinstance(sampling, Sampling)
        both = [each.tokens(index) for each in (self, other)]
        at = next((place for place, (a, b) in enumerate(zip(*both, strict=False)) if a != b), None)
        if sampling.greedy or at is None:
            return False
        key = draw_keys([SamplingRow(sampling, len(self.prompts[index]) + at, last_token=0)])
        logs = _log_uniforms(torch.tensor([key], dtype=torch.float64), 1 + SEGMENT)[0, 1:]
        scores = [[each for part in traffic.served[index] for each in part.logprobs][at] for traffic in (self, other)]
        times = [float(logs[tokens[at]]) / math.exp(score) for tokens, score in zip(both, scores, strict=True)]
        return times[0] == pytest.approx(times[1], rel=1e-5)

    def _tied(self, index: int, name: str, values: list[float], expected: list[float], near: float) -> bool:
        """Return True if at one position only tokens may have tied at the last place of a cut: after rounding both are kept, or one."""
        sampling, top_n = self.requests[index]["sampling"], self.requests[index].get("top_n", 0)
        assert isinstance(sampling, Sampling)
        differ = sum(abs(each - its) > near for each, its in zip(values, expected, strict=True))
        return sampling.cuts and differ == {"logprobs": 1, "top_tokens": top_n}.get(name)


def _numbers(values: object) -> list[float]:
    """Return the numbers in nested lists, in order; top tokens without their places in steps."""
    if isinstance(values, TopTokens):
        return _numbers((values.token_ids, values.logprobs))
    if isinstance(values, (list, tuple)):
        return [number for value in values for number in _numbers(value)]
    assert isinstance(values, (int, float))
    return [values]
