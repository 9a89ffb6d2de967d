"""The mapping of a sequence's parameters to TensorRT-LLM's, for every sampler: what is passed, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from model_folders import ENGINE, RANKS, compiled_engine, fill
from standin import VERSIONS, importable, model_folder
from trtllm_engines import constructed

from text_generation_common.grammar_options import JSON_OPTIONS
from text_generation_proto.values import Grammar, GrammarKind, LogprobOptions, Sampling, Stopping, TraceContext
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import NewSequence
from text_generation_shard.engines.tensorrt_llm.construct import Construction, construct_compiled
from text_generation_shard.engines.tensorrt_llm.library import load_library
from text_generation_shard.engines.tensorrt_llm.lora import LoraRequests
from text_generation_shard.engines.tensorrt_llm.parameters import EngineCapabilities, Parameters

PROMPT = tuple(range(100, 120))
EOS = 2
VOCAB_SIZE = 4096
SETUPS: dict[str, tuple[str, dict[str, object]]] = {
    "1.2": ("1.2", {}),
    "1.2 TRTLLMSampler": ("1.2", {"sampler_type": "TRTLLMSampler"}),
    "1.2 compiled": ("1.2", {}),
    "1.3": ("1.3", {}),
}
"""Name → release of the stand-in, --trtllm-options."""
DROPS_PENALTIES = frozenset({"1.2"})
"""Set-ups whose sampler ignores penalties, min_p, min_tokens and seeds."""
NO_PROMPT_LOGPROBS = frozenset(SETUPS) - {"1.3"}
NO_GRAMMARS = frozenset({"1.2 compiled"})


@dataclass(frozen=True)
class SetUp:
    """The parameters of an engine, and what it was constructed with."""

    name: str
    construction: Construction
    parameters: Parameters
    guide: Any
    """The class GuidedDecodingParams."""


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SetUp]:
    version, options = SETUPS[request.param]
    folder = tmp_path_factory.mktemp("folders")
    with pytest.MonkeyPatch.context() as patch, importable(version, patch):
        library = load_library()
        if request.param == "1.2 compiled":
            model = fill(folder / "engines", ENGINE, RANKS)
            config = ShardConfig(engine="tensorrt-llm", model_path=str(model), tensor_parallel=2)
            construction = construct_compiled(config, compiled_engine(model), options)
        else:
            model = model_folder(folder / "model")
            (model / "tokenizer.json").touch()
            construction = constructed(library, model, options)
        parameters = Parameters(library, construction.capabilities, VOCAB_SIZE, (EOS, 3), LoraRequests(object, {}))
        yield SetUp(request.param, construction, parameters, library.guided_decoding_params)


def sequence(**fields: Any) -> NewSequence:  # noqa: ANN401 - fields of NewSequence
    return NewSequence(**{"slot": 0, "prompt": PROMPT, "stopping": Stopping(5)} | fields)


def sampled(**fields: Any) -> dict[str, object]:  # noqa: ANN401 - fields of Sampling
    return {"sampling": Sampling(greedy=False, **fields)}


def stopping(*eos: int, stop: tuple[int, ...] = (), least: int = 0) -> dict[str, object]:
    return {"stopping": Stopping(5, frozenset(eos), frozenset(stop), least)}


PLAIN = {
    "max_tokens": 5,
    "detokenize": False,
    "include_stop_str_in_output": True,
    "end_id": EOS,
    "pad_id": EOS,
    "ignore_eos": True,
    "top_k": 1,
}
"""The keywords of a greedy sequence that no token ends."""
DRAWN = {"top_k": ..., "temperature": 1.0, "top_p": 1.0, "seed": 0}
"""The change where tokens are drawn; `...`: the keyword is absent."""
NO_IGNORE = {"ignore_eos": ...}


@dataclass(frozen=True)
class Case:
    """Fields of a sequence, how they change PLAIN, and where they are refused."""

    asked: dict[str, Any]
    change: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    """The name of the refused parameter."""
    refused_by: frozenset[str] = frozenset()


CASES = {
    "nothing": Case({}),
    "max_new_tokens": Case({"stopping": Stopping(7)}, {"max_tokens": 7}),
    "draw": Case(sampled(), DRAWN),
    "temperature": Case(sampled(temperature=0.5), DRAWN | {"temperature": 0.5}),
    "top_k and top_p": Case(sampled(top_k=5, top_p=0.5), DRAWN | {"top_k": 5, "top_p": 0.5}),
    "top_k above the vocabulary": Case(sampled(top_k=2**31), DRAWN),
    "seed": Case(sampled(seed=42), DRAWN | {"seed": 42}),
    "min_p": Case(sampled(min_p=0.1), DRAWN | {"min_p": 0.1}, "min_p", DROPS_PENALTIES),
    "repetition_penalty": Case(
        {"sampling": Sampling(repetition_penalty=1.3)},
        {"repetition_penalty": 1.3},
        "repetition_penalty",
        DROPS_PENALTIES,
    ),
    "frequency_penalty of TGI": Case(
        {"sampling": Sampling(frequency_penalty=0.5)}, {"frequency_penalty": 0.5}, "frequency_penalty", DROPS_PENALTIES
    ),
    "penalties of OpenAI": Case(
        {"sampling": Sampling(output_frequency_penalty=0.5, output_presence_penalty=0.25)},
        {"frequency_penalty": 0.5, "presence_penalty": 0.25, "prompt_ignore_length": 20},
        "output_frequency_penalty",
        DROPS_PENALTIES,
    ),
    "presence_penalty after a move": Case(
        {"sampling": Sampling(output_presence_penalty=0.25), "generated_tokens": 3},
        {"frequency_penalty": 0.0, "presence_penalty": 0.25, "prompt_ignore_length": 17},
        "output_presence_penalty",
        DROPS_PENALTIES,
    ),
    "eos": Case(stopping(EOS), NO_IGNORE),
    "several eos": Case(stopping(104, 3, EOS), NO_IGNORE | {"stop_token_ids": [3, 104]}),
    "eos without the model's": Case(
        stopping(110, 104), {"end_id": 104, "pad_id": 104, "stop_token_ids": [110]} | NO_IGNORE
    ),
    "eos and stop token": Case(stopping(EOS, stop=(9,)), NO_IGNORE | {"stop_token_ids": [9]}),
    "stop token": Case(stopping(stop=(9,)), {"stop_token_ids": [9]}),
    "min_new_tokens": Case(stopping(EOS, least=3), NO_IGNORE | {"min_tokens": 3}, "min_new_tokens", DROPS_PENALTIES),
    "tokens": Case({"logprobs": LogprobOptions(tokens=True)}, {"logprobs": 1}),
    "top_n": Case({"logprobs": LogprobOptions(3)}, {"logprobs": 3}),
    "prompt_logprobs": Case(
        {"logprobs": LogprobOptions(prompt=True)}, {"prompt_logprobs": 1}, "prompt", NO_PROMPT_LOGPROBS
    ),
    "prompt_top_n": Case(
        {"logprobs": LogprobOptions(prompt=True, prompt_top_n=4)}, {"prompt_logprobs": 4}, "prompt", NO_PROMPT_LOGPROBS
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_keywords(setup: SetUp, case: Case) -> None:
    asked = sequence(**case.asked)
    problem = setup.parameters.problem(asked)
    if setup.name in case.refused_by:
        assert problem is not None
        assert problem.startswith(f"{case.refused} is not supported: ")
        return
    assert problem is None
    expected = {name: value for name, value in (PLAIN | case.change).items() if value is not ...}
    if setup.name in DROPS_PENALTIES:
        expected.pop("seed", None)
    assert setup.parameters.sampling(asked) == expected
    made = setup.parameters.arguments(asked)
    assert (made["inputs"], made["streaming"]) == ({"prompt_token_ids": list(PROMPT)}, True)
    assert {name: getattr(made["sampling_params"], name) for name in expected} == expected


def test_a_bias_is_a_value_for_every_token(setup: SetUp) -> None:
    sampling = Sampling(logit_bias_ids=(5, 7, 5), logit_bias_values=(2.0, -1.0, 0.5))
    bias = setup.parameters.sampling(sequence(sampling=sampling))["embedding_bias"]
    assert bias.shape == (VOCAB_SIZE,)
    assert {int(at): float(bias[at]) for at in bias.nonzero()[0]} == {5: 2.5, 7: -1.0}
    allowed = Sampling(allowed_token_ids=(5, 6), logit_bias_ids=(5,), logit_bias_values=(2.0,))
    bias = setup.parameters.sampling(sequence(sampling=allowed))["embedding_bias"]
    assert {at: float(value) for at, value in enumerate(bias) if value > -1e8} == {5: 2.0, 6: 0.0}


@pytest.mark.parametrize(
    ("grammar", "guide"),
    [
        (Grammar(GrammarKind.REGEX, "[a-z]+"), {"regex": "[a-z]+"}),
        (Grammar(GrammarKind.LARK, "start: /a/"), {"grammar": "start: /a/"}),
        (
            Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
            {"json": json.dumps({"type": "object", "x-guidance": JSON_OPTIONS})},
        ),
        (Grammar(GrammarKind.JSON_SCHEMA, "true"), {"json": "true"}),
    ],
    ids=["regex", "lark", "schema", "schema that is no object"],
)
def test_grammars(setup: SetUp, grammar: Grammar, guide: dict[str, str]) -> None:
    asked = sequence(grammar=grammar)
    problem = setup.parameters.problem(asked)
    if setup.name in NO_GRAMMARS:
        assert problem == f"grammars of kind {grammar.kind.value} are not supported"
    else:
        assert problem is None
        assert setup.parameters.sampling(asked)["guided_decoding"] == setup.guide(**guide)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (sampled(typical_p=0.5), "typical_p is not supported: "),
        ({"sampling": Sampling(watermark=True)}, "watermark is not supported: "),
        ({"grammar": Grammar(GrammarKind.REGEX, "")}, "the grammar is empty"),
        ({"grammar": Grammar(GrammarKind.UNSPECIFIED, "a")}, "grammars of kind unspecified are not supported"),
    ],
    ids=["typical_p", "watermark", "empty grammar", "unknown grammar"],
)
def test_refused_by_every_setup(setup: SetUp, asked: dict[str, object], problem: str) -> None:
    assert str(setup.parameters.problem(sequence(**asked))).startswith(problem)


def test_a_sequence_with_a_grammar_cannot_move(setup: SetUp) -> None:
    asked = sequence(grammar=Grammar(GrammarKind.REGEX, "a"), generated_tokens=1)
    expected = "not supported" if setup.name in NO_GRAMMARS else "guided decoding begins with the first new token"
    assert expected in str(setup.parameters.problem(asked))


def test_both_frequency_penalties_are_refused(setup: SetUp) -> None:
    asked = sequence(sampling=Sampling(frequency_penalty=0.5, output_presence_penalty=0.5))
    expected = "not supported" if setup.name in DROPS_PENALTIES else "frequency_penalty cannot be combined with"
    assert expected in str(setup.parameters.problem(asked))


def test_unsupported_parameters_are_listed(setup: SetUp) -> None:
    listed = {name for name, _ in setup.construction.capabilities.unsupported}
    penalties = {"repetition_penalty", "frequency_penalty", "output_frequency_penalty", "output_presence_penalty"}
    expected = {"typical_p", "watermark", "bad_words"}
    if setup.name in DROPS_PENALTIES:
        expected |= penalties | {"min_p", "seed", "min_new_tokens"}
    if setup.name in NO_PROMPT_LOGPROBS:
        expected |= {"prompt", "prompt_top_n"}
    assert listed == expected


def test_salts(setup: SetUp) -> None:
    salts = [setup.parameters.arguments(sequence(cache_salt=salt)).get("cache_salt") for salt in ("a", "b", "")]
    assert salts == ["a", "b", None]
    scored = [
        setup.parameters.arguments(sequence(logprobs=LogprobOptions(prompt=True), cache_salt="a"))["cache_salt"]
        for _ in range(2)
    ]
    assert len({"a", *scored}) == 3


def test_an_engine_without_gathered_logits_has_no_logprobs(setup: SetUp, tmp_path: Path) -> None:
    config = ENGINE | {"build_config": ENGINE["build_config"] | {"gather_generation_logits": False}}
    model = fill(tmp_path / "engines", config, RANKS)
    shard = ShardConfig(engine="tensorrt-llm", model_path=str(model), tensor_parallel=2)
    capabilities = construct_compiled(shard, compiled_engine(model), {}).capabilities
    parameters = Parameters(load_library(), capabilities, VOCAB_SIZE, (), LoraRequests(object, {}))
    assert "top_n is not supported" in str(parameters.problem(sequence(logprobs=LogprobOptions(1))))
    assert "logprobs" not in parameters.sampling(sequence())


def test_priorities(setup: SetUp) -> None:
    passed = [setup.parameters.arguments(sequence(priority=priority)).get("priority") for priority in range(6)]
    assert passed == ([None, 1.0, 0.75, 0.5, 0.25, 0.25] if setup.name == "1.3" else [None] * 6)


def test_the_headers_of_a_trace(setup: SetUp) -> None:
    for trace, headers in (
        (None, None),
        (TraceContext("00-1-2-01"), {"traceparent": "00-1-2-01"}),
        (TraceContext("00-1-2-01", "a=b"), {"traceparent": "00-1-2-01", "tracestate": "a=b"}),
    ):
        assert setup.parameters.arguments(sequence(trace=trace)).get("trace_headers") == headers


@pytest.mark.parametrize("version", VERSIONS)
def test_guides_of_xgrammar(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guides = {
        GrammarKind.EBNF: "grammar",
        GrammarKind.STRUCTURAL_TAG: "structural_tag",
        GrammarKind.JSON_SCHEMA: "json",
    }
    with importable(version, monkeypatch):
        capabilities = EngineCapabilities(penalties=True, prompt_logprobs=False, grammar_kinds=tuple(guides))
        parameters = Parameters(load_library(), capabilities, VOCAB_SIZE, (EOS,), LoraRequests(object, {}))
        for kind, name in guides.items():
            constrained = sequence(grammar=Grammar(kind, "x"))
            assert parameters.problem(constrained) is None
            assert getattr(parameters.sampling(constrained)["guided_decoding"], name) == "x"
