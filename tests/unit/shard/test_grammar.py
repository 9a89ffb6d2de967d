"""Grammars on both step-scheduled engines: the text follows them, and other sequences are not affected."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from byte_tokenizer import END, write_tokenizer
from engine_driver import Driver, Stream
from tiny_engines import TINY_LLAMA
from tokenizers import Tokenizer

from text_generation_common.grammar_options import MAX_GRAMMAR_TEXT
from text_generation_proto.values import (
    FailureCode,
    FinishReason,
    Grammar,
    GrammarKind,
    Sampling,
    Stopping,
    WarmUpLimits,
)
from text_generation_shard import grammar
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, NewSequence, Orders, StepResult
from text_generation_shard.engines import build_engine
from text_generation_shard.grammar import Matcher, load_grammars
from text_generation_shard.progress import StepMonitor
from text_generation_shard.session import EngineSession
from text_generation_shard.step import masks

LLAMA = TINY_LLAMA | {
    # Larger than the tokenizer's: a grammar never allows the additional tokens.
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "eos_token_id": [END, 299],
}
PROMPT = tuple(range(70, 100))
SAMPLED = Sampling(greedy=False, temperature=1.3, seed=5)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
        "kind": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
REGEX = Grammar(GrammarKind.REGEX, r"(abc|[0-9]{2,5}-x){1,4}")
LARK = Grammar(GrammarKind.LARK, 'start: "yes" | "no" " "? /[a-f]{3}/')
BROKEN = [
    (Grammar(GrammarKind.REGEX, "(unclosed"), "unclosed group"),
    (Grammar(GrammarKind.REGEX, "(?=ahead)a"), "look-around"),
    (Grammar(GrammarKind.REGEX, "a{100000}"), "too long to follow"),
    (Grammar(GrammarKind.JSON_SCHEMA, "{not json"), "cannot be read: key must be a string"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","uniqueItems":true}'), "uniqueItems"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"oneOf":[{"type":"number"},{"type":"integer"}]}'), "oneOf constraints"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref":"#"}'), "no text can match it"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref":"https://example.com/schema.json"}'), "not present"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","items":' * 2000 + "{}" + "}" * 2000), "recursion limit"),
    (Grammar(GrammarKind.LARK, "start: missing"), "missing"),
    (Grammar(GrammarKind.UNSPECIFIED, "a"), "no known kind"),
    (Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_TEXT + 1)), "longer than 262144 characters"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=["echo", "torch"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Engine:
    config = ShardConfig(
        engine=request.param, model_path=str(folder), load_format="dummy", device="cpu", max_batch_size=12
    )
    return build_engine(config)


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))


def stopping(new: int = 300, **more: int) -> Stopping:
    return Stopping(new, frozenset({END}), **more)  # type: ignore[arg-type]


def text(tokenizer: Tokenizer, stream: Stream) -> str:
    assert stream.failure is None, stream.failure
    assert stream.finish is FinishReason.EOS_TOKEN
    assert stream.tokens[-1] == END
    assert END not in stream.tokens[:-1]
    decoded: str = tokenizer.decode(stream.tokens, skip_special_tokens=True)
    return decoded


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_gives_one_line_of_json_that_validates(driver: Driver, tokenizer: Tokenizer, seed: int) -> None:
    sampling = Sampling(greedy=False, temperature=2.0, seed=seed)
    stream = driver.admit(PROMPT, stopping=stopping(), sampling=sampling, grammar=JSON)
    driver.run()
    written = text(tokenizer, stream)
    value = json.loads(written)
    jsonschema.validate(value, SCHEMA)
    assert json.dumps(value, ensure_ascii=False) == written or "\\" in written


@pytest.mark.parametrize("chunk", [7, 1 << 30])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_a_replay_follows_the_grammar_from_its_start(driver: Driver, sampling: Sampling, chunk: int) -> None:
    served = driver.admit(PROMPT, stopping=stopping(), sampling=sampling, grammar=JSON)
    driver.run()
    prompt = [*PROMPT, *served.tokens]
    options = {"stopping": stopping(1), "generated_tokens": len(served.tokens), "replayed": True}
    driver.admit(prompt, sampling=sampling, grammar=JSON, chunk=chunk, **options)
    (scores,) = (scores for result in iter(driver.step, None) for scores in result.generated_scores)
    assert scores.drawn_ids == served.tokens
    assert scores.logprobs == pytest.approx(served.logprobs, abs=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(greedy=False, top_k=1, min_p=0.5, typical_p=0.5)])
def test_a_regex_matches_the_whole_text(driver: Driver, tokenizer: Tokenizer, sampling: Sampling) -> None:
    stream = driver.admit(PROMPT, stopping=stopping(), sampling=sampling, grammar=REGEX)
    driver.run()
    assert re.fullmatch(REGEX.text, text(tokenizer, stream))


def test_masks_that_are_computed_beside_the_steps_change_no_text(
    driver: Driver, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts() -> list[list[int]]:
        options = {"stopping": stopping(), "sampling": SAMPLED}
        streams = [driver.admit(PROMPT, grammar=grammar, **options) for grammar in (REGEX, JSON)]  # type: ignore[arg-type]
        free = driver.admit(PROMPT, 40)
        driver.run()
        assert text(tokenizer, streams[0])
        return [stream.tokens for stream in (*streams, free)]

    in_steps = texts()
    monkeypatch.setattr(masks, "STEP_BUDGET_S", -1.0)
    assert texts() == in_steps
    monkeypatch.setattr(grammar, "SLOW_MASK_S", -1.0)
    assert texts() == in_steps
    monkeypatch.setattr(grammar, "SLOW_MASKS_BUDGET_S", 0.0)
    failed, free = driver.admit(PROMPT, stopping=stopping(), grammar=REGEX), driver.admit(PROMPT, 40)
    driver.run()
    assert failed.failure is not None
    assert "takes too long to follow" in failed.failure.message
    assert free.tokens == in_steps[2]


def test_each_row_follows_its_own_grammar(driver: Driver, tokenizer: Tokenizer) -> None:
    free = [driver.admit(PROMPT, 40), driver.admit(PROMPT, 40, sampling=SAMPLED)]
    alone = driver.admit(PROMPT, stopping=stopping(), sampling=SAMPLED, grammar=REGEX)
    driver.run()
    together = [
        driver.admit(PROMPT, 40),
        driver.admit(PROMPT, stopping=stopping(), sampling=SAMPLED, grammar=REGEX),
        driver.admit(PROMPT, stopping=stopping(), sampling=SAMPLED, grammar=JSON),
        driver.admit(PROMPT, 40, sampling=SAMPLED),
        driver.admit(PROMPT, stopping=stopping(), grammar=LARK, chunk=7),
    ]
    driver.run()
    assert [together[0].tokens, together[3].tokens] == [stream.tokens for stream in free]
    assert together[1].tokens == alone.tokens
    jsonschema.validate(json.loads(text(tokenizer, together[2])), SCHEMA)
    assert re.fullmatch("yes|no ?[a-f]{3}", text(tokenizer, together[4]))


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_a_preempted_sequence_continues_its_grammar(driver: Driver, tokenizer: Tokenizer, steps: int) -> None:
    whole = driver.admit(PROMPT, stopping=stopping(), sampling=SAMPLED, grammar=JSON)
    driver.run()
    first = driver.admit(PROMPT, stopping=stopping(), sampling=SAMPLED, grammar=JSON)
    for _ in range(steps):
        driver.step()
    again = driver.preempt(first)
    driver.run()
    assert first.tokens + again.tokens == whole.tokens
    assert again.finish is FinishReason.EOS_TOKEN


@pytest.mark.parametrize(("grammar", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_a_grammar_that_cannot_be_compiled_is_refused_in_one_line(folder: Path, grammar: Grammar, words: str) -> None:
    grammars = load_grammars(str(folder))
    assert grammars is not None
    problem = str(grammars.build(grammar).exception(30))
    assert words in problem
    assert "\n" not in problem


DEAD_END = Grammar(GrammarKind.LARK, 'start: "xy" BOTH\nBOTH: /b+/ & /c+/')


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [
        (PROMPT, {"grammar": BROKEN[0][0]}, "unclosed group"),
        ((*PROMPT, 5, 6), {"grammar": JSON, "generated_tokens": 2}, "the tokens generated before do not fit"),
        (PROMPT, {"grammar": DEAD_END}, "the grammar cannot be followed: no text can match it"),
    ],
    ids=["not compiled", "generated tokens", "dead end"],
)
def test_an_unusable_grammar_fails_only_its_sequence(
    driver: Driver, prompt: tuple[int, ...], new: dict[str, Any], words: str
) -> None:
    expected = driver.alone(PROMPT, 9)
    neighbour, bad = driver.admit(PROMPT, 9), driver.admit(prompt, **new)
    driver.run()
    assert bad.failure is not None
    assert bad.failure.code is FailureCode.GRAMMAR
    assert words in bad.failure.message
    assert (len(bad.tokens) > 0) is (new["grammar"] is DEAD_END)
    assert neighbour.tokens == expected


def test_without_eos_tokens_a_complete_grammar_still_ends_the_sequence(driver: Driver, tokenizer: Tokenizer) -> None:
    stream = driver.admit(PROMPT, 50, grammar=Grammar(GrammarKind.REGEX, "ab(cd)?e"))
    driver.run()
    assert text(tokenizer, stream) in ("abe", "abcde")


def test_min_new_tokens_holds_while_the_grammar_can_continue(driver: Driver, tokenizer: Tokenizer) -> None:
    open_ended, closed = (
        driver.admit(PROMPT, stopping=stopping(40, min_new_tokens=12), grammar=Grammar(GrammarKind.REGEX, regex))
        for regex in ("[xyz]*", "[xyz]{3}")
    )
    driver.run()
    assert re.fullmatch("[xyz]{3}", text(tokenizer, closed))
    assert END not in open_ended.tokens[:12]
    assert re.fullmatch("[xyz]+", tokenizer.decode(open_ended.tokens))


@pytest.mark.parametrize("engine", ["torch"], indirect=True)
@pytest.mark.parametrize(
    ("regex", "allowed", "bad", "texts"),
    [
        ("[xyz]{3}", "x", "", "xxx"),
        ("xxy?", "x", "", "xx"),
        ("xxyy", "x", "", "xxyy"),
        ("[xy]{3}", "xyz", "xy", "[xy]{3}"),
        ("[xy]{3}", "", "x", "yyy"),
        (None, "x", "x", "x{5}"),
    ],
)
def test_constraints_that_exclude_each_other_leave_a_token(
    driver: Driver, tokenizer: Tokenizer, regex: str | None, allowed: str, bad: str, texts: str
) -> None:
    ids = {letter: tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in "xyz"}
    sampling = Sampling(
        allowed_token_ids=tuple(ids[letter] for letter in allowed), bad_words=tuple((ids[letter],) for letter in bad)
    )
    grammar = None if regex is None else Grammar(GrammarKind.REGEX, regex)
    stream = driver.admit(PROMPT, stopping=stopping(5), sampling=sampling, grammar=grammar)
    ends = driver.admit(PROMPT, stopping=stopping(5, min_new_tokens=3), sampling=Sampling(allowed_token_ids=(END,)))
    driver.run()
    assert (stream.failure, ends.failure) == (None, None)
    assert re.fullmatch(texts, tokenizer.decode(stream.tokens, skip_special_tokens=True))
    assert ends.tokens == [END] * 4


def test_an_engine_without_a_tokenizer_refuses_grammars(tmp_path: Path) -> None:
    engine = build_engine(ShardConfig(engine="echo", model_path=str(tmp_path)))
    assert engine.info.grammar_kinds == ()
    driver = Driver(engine, engine.warm_up(WarmUpLimits()))
    stream = driver.admit(PROMPT, grammar=REGEX)
    driver.step()
    assert stream.failure is not None
    assert (stream.failure.code, stream.failure.message) == (FailureCode.INVALID, "the engine serves no grammars")


@pytest.mark.parametrize("content", ["{}", "no json", '{"model": {"type": "BPE"}}'])
def test_an_unreadable_tokenizer_gives_no_grammars(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    assert load_grammars(str(tmp_path)) is None


def test_an_eos_token_beyond_the_tokenizer_is_ignored(folder: Path) -> None:
    grammars = load_grammars(str(folder), [END, 299])
    assert grammars is not None
    assert grammars.end_token_ids == {END}


def test_a_text_follows_its_grammar_where_ids_are_unused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary.update({name: token_id + 300 for name, token_id in vocabulary.items() if token_id > 200})
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 600}))
    engine = build_engine(ShardConfig(engine="torch", model_path=str(tmp_path), load_format="dummy", device="cpu"))
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))
    stream = driver.admit(PROMPT, stopping=stopping(), sampling=SAMPLED, grammar=JSON)
    driver.run()
    jsonschema.validate(json.loads(text(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), stream)), SCHEMA)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("grammar", [REGEX, BROKEN[0][0]], ids=["good", "broken"])
def test_a_session_continues_while_a_grammar_is_compiled(folder: Path, grammar: Grammar) -> None:
    engine = build_engine(ShardConfig(engine="echo", model_path=str(folder), max_batch_size=4))
    engine.warm_up(WarmUpLimits())
    assert engine.grammars is not None
    # Both threads that build are busy with something that takes its time.
    free = threading.Event()
    for _ in range(2):
        engine.grammars._pool.submit(free.wait, 30)
    reports: list[StepResult] = []
    session = EngineSession(engine, emit=lambda report: seen(report), monitor=StepMonitor())
    over: set[int] = set()

    def seen(report: StepResult) -> None:
        reports.append(report)
        over.update(slot for slot, _ in report.finished)
        over.update(failure.slot for failure in report.failed)
        if 1 in over:
            free.set()
        if over == {0, 1}:
            session.end()

    def admission(slot: int, what: Grammar | None) -> NewSequence:
        return NewSequence(slot, PROMPT, Stopping(5), blocks=tuple(range(slot * 4, slot * 4 + 4)), grammar=what)

    session.order(Orders(1, placements=(admission(0, grammar),), prefill=((0, len(PROMPT)),)))
    session.order(Orders(2, placements=(admission(1, None),), prefill=((1, len(PROMPT)),)))
    session.run()
    order = [slot for report in reports for slot in report.slots]
    assert order[:5] == [1] * 5, "the other sequence does not wait"
    failed = [failure.code for report in reports for failure in report.failed]
    assert failed == ([] if grammar is REGEX else [FailureCode.GRAMMAR])
    assert (0 in order) is (grammar is REGEX)


def test_a_release_while_the_grammar_is_compiled(driver: Driver) -> None:
    late: Future[Matcher] = Future()
    engine = driver.engine
    blocks = (0, 1)
    waiting = NewSequence(0, PROMPT, Stopping(2), blocks=blocks, grammar=REGEX, matcher=late)
    assert engine.apply(Orders(1, placements=(waiting,), prefill=((0, len(PROMPT)),))) == []
    assert engine.step() is None
    assert engine.apply(Orders(2, release=(0,))) == []
    assert late.cancelled()
    following = NewSequence(0, PROMPT, Stopping(2), blocks=blocks)
    assert engine.apply(Orders(3, placements=(following,), prefill=((0, len(PROMPT)),))) == []
    first = engine.step()
    assert first is not None
    assert first.slots == [0]
    engine.reset()
