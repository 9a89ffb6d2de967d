"""Traps of TensorRT-LLM in construction, submission, sampling and results; the stand-in's code names the sources."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from standin_loading import Standin, tokens

PROMPT = [5, 6, 7, 8]
LONG = list(range(100, 164))
ENDLESS = 20_000
SetUp = Callable[..., None]


# --------------------------------------------------------------------------------------------------------- construction


def test_unknown_keywords_are_refused(standin: Standin) -> None:
    with pytest.raises(ValueError, match="LLM got invalid argument: nonsense"):
        standin.llm(nonsense=1)
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        standin.llm(kv_cache_config={"nonsense": 1})
    if standin.version == "1.3":
        with pytest.raises(ValueError, match="LLM got invalid argument: sampler_type"):
            standin.llm(sampler_type="auto")


def test_guided_decoding_needs_a_tokenizer(standin: Standin, model_folder: Path) -> None:
    """The error of the worker is the cause of what the constructor raises."""
    with pytest.raises(RuntimeError, match="Executor worker returned error") as caught:
        standin.llm(model_folder, guided_decoding_backend="xgrammar")
    assert isinstance(caught.value.__cause__, AssertionError)


# ----------------------------------------------------------------------------------------------------------- submission


# -------------------------------------------------------------------------------------------------------------- reading


async def test_the_same_object_is_yielded_with_one_growing_list(standin: Standin, set_up: SetUp) -> None:
    set_up(tokens_per_step=3)
    result = standin.llm().generate_async({"prompt_token_ids": PROMPT}, standin.params(max_tokens=7), streaming=True)
    lengths, lists = [], []
    async for item in result:
        assert item is result
        lists.append(item.outputs[0].token_ids)
        lengths.append(len(lists[-1]))
    assert all(found is lists[0] for found in lists)
    assert (lengths, result.finished, result.outputs[0].finish_reason) == ([3, 6, 7], True, "length")


async def test_max_tokens_are_silently_reduced(standin: Standin) -> None:
    result = await standin.llm(max_seq_len=10).generate_async(PROMPT, standin.params(max_tokens=1000))
    assert (len(result.outputs[0].token_ids), result.outputs[0].finish_reason) == (6, "length")
    llm = standin.llm(kv_cache_config={"max_tokens": 64, "tokens_per_block": 32}, max_seq_len=4096)
    assert len(await tokens(llm.generate_async(PROMPT, standin.params(max_tokens=None)))) == 60


async def test_readers_on_a_second_event_loop_are_not_woken(standin: Standin, set_up: SetUp) -> None:
    set_up(step_ms=1)
    llm = standin.llm()
    first = llm.generate_async(PROMPT, standin.params(max_tokens=ENDLESS), streaming=True)
    await anext(first)

    async def read_on_another_loop() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.generate_async(PROMPT, standin.params(max_tokens=2)), 0.2)

    await asyncio.to_thread(asyncio.run, read_on_another_loop())
    first.abort()
    await first


# ----------------------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("fields", "old", "new"),
    [
        ({"end_id": 7}, ([5, 6, 7], "stop"), ([5, 6, 7], "stop")),
        ({"stop_token_ids": [7], "max_tokens": 3}, ([5, 6, 7], "length"), ([5, 6, 7], "length")),
        (
            {"end_id": 6, "ignore_eos": True, "stop_token_ids": [7], "max_tokens": 4},
            ([5, 6], "stop"),
            ([5, 6, 7, 8], "length"),
        ),
        (
            {"end_id": 6, "stop_token_ids": [8], "min_tokens": 4, "max_tokens": 20},
            ([5, 7, 7, 5, 5, 6], "stop"),
            ([5, 7, 7, 5, 5, 6], "stop"),
        ),
    ],
    ids=["end token", "length wins", "ignore_eos ignores stop tokens in 1.3", "min_tokens"],
)
async def test_ends(
    standin: Standin, fields: dict[str, object], old: tuple[list[int], str], new: tuple[list[int], str]
) -> None:
    output = (await standin.llm().generate_async(PROMPT, standin.params(**fields))).outputs[0]
    expected = old if standin.version == "1.2" else new
    assert (list(output.token_ids), output.finish_reason) == expected


async def test_a_stop_token_is_removed_into_a_new_list(standin: Standin) -> None:
    result = standin.llm().generate_async(PROMPT, standin.params(stop_token_ids=[9, 7], logprobs=1), streaming=True)
    lists = [item.outputs[0].token_ids async for item in result]
    output = result.outputs[0]
    assert (lists[-1], output.finish_reason, output.stop_reason, len(output.logprobs)) == ([5, 6], "stop", 7, 3)
    assert lists[-1] is not lists[0]
    kept = standin.params(stop_token_ids=[7], include_stop_str_in_output=True)
    assert await tokens(standin.llm().generate_async(PROMPT, kept)) == [5, 6, 7]


# ------------------------------------------------------------------------------------------------------------- sampling


async def test_nothing_set_is_greedy_and_a_temperature_of_one_is_not(standin: Standin) -> None:
    llm = standin.llm()
    greedy = (LONG * 2)[:40]
    for fields in ({}, {"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}, {"top_p": 0.0}):
        assert await tokens(llm.generate_async(LONG, standin.params(max_tokens=40, **fields))) == greedy
    for fields in ({"temperature": 1.0}, {"top_p": 1.0}, {"top_k": 0}):
        assert await tokens(llm.generate_async(LONG, standin.params(max_tokens=40, **fields))) != greedy


async def test_the_default_sampler_of_1_2_ignores_penalties_min_p_and_seeds(standin: Standin) -> None:
    samplers = [({}, True)] if standin.version == "1.3" else [({}, False), ({"sampler_type": "TRTLLMSampler"}, True)]
    for arguments, supported in samplers:
        llm = standin.llm(**arguments)
        for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            params = standin.params(max_tokens=6, **{penalty: 1.2})
            expected = [5, 6, 7, 8, 7, 8] if supported else [5, 5, 6, 6, 7, 8]
            assert await tokens(llm.generate_async([5, 5, 6, 6, 7, 8], params)) == expected
        drawn = {"temperature": 1.0, "max_tokens": 40}
        narrowed = await tokens(llm.generate_async(LONG, standin.params(min_p=0.9, **drawn)))
        assert (narrowed == LONG[:40]) is supported
        first, again = [await tokens(llm.generate_async(LONG, standin.params(seed=7, **drawn))) for _ in range(2)]
        assert (first == again) is supported


async def test_an_embedding_bias(standin: Standin) -> None:
    bias = [0.0] * 16
    bias[6], bias[13] = -100.0, 100.0
    params = standin.params(embedding_bias=bias, max_tokens=3)
    assert await tokens(standin.llm().generate_async(PROMPT, params)) == [13] * 3


# ----------------------------------------------------------------------------------------------------- log-probabilities


async def test_zero_logprobs_mean_the_chosen_token_only_in_1_3(standin: Standin) -> None:
    output = (await standin.llm().generate_async(PROMPT, standin.params(logprobs=0, max_tokens=2))).outputs[0]
    assert [list(entry) for entry in output.logprobs] == ([] if standin.version == "1.2" else [[5], [6]])


async def test_the_chosen_token_comes_first_even_if_improbable(standin: Standin) -> None:
    params = standin.params(logprobs=2, temperature=1.0, max_tokens=40)
    output = (await standin.llm().generate_async(LONG, params)).outputs[0]
    assert len(output.logprobs) == len(output.token_ids)
    extra = 0
    for position, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert next(iter(entry)) == token
        is_top = token in (LONG[position], LONG[position] + 1)
        assert len(entry) == (2 if is_top else 3)
        extra += not is_top
    assert extra


async def test_prompt_logprobs_are_for_the_next_token(standin: Standin) -> None:
    """In 1.2 they lack the prompt's own token if it is improbable."""
    output = (await standin.llm().generate_async([5, 6, 6, 7], standin.params(prompt_logprobs=2))).outputs[0]
    improbable = [7, 8] if standin.version == "1.2" else [6, 7, 8]
    assert [list(row) for row in output.prompt_logprobs] == [[6, 7], improbable, [7, 8], [5, 6]]


async def test_the_last_token_of_an_aborted_request_may_lack_logprobs_in_1_2(standin: Standin, set_up: SetUp) -> None:
    set_up(cancel_with_token=1, step_ms=1)
    result = standin.llm().generate_async(PROMPT, standin.params(logprobs=1, max_tokens=ENDLESS), streaming=True)
    await anext(result)
    result.abort()
    if standin.version == "1.2":
        with pytest.raises(AssertionError, match="logprobs length"):
            await result
    else:
        assert (await result).outputs[0].finish_reason == "cancelled"


# ------------------------------------------------------------------------------------------------------ guided decoding


async def answer(standin: Standin, folder: Path, backend: str | None, **guide: object) -> str:
    """The text generated under a guide."""
    llm = standin.llm(folder, skip_tokenizer_init=False, guided_decoding_backend=backend)
    guided = standin.find("tensorrt_llm.llmapi", "GuidedDecodingParams")(**guide)
    prompt = llm.tokenizer.encode("abc 12")
    ids = await tokens(llm.generate_async(prompt, standin.params(end_id=0, max_tokens=200, guided_decoding=guided)))
    return str(llm.tokenizer.decode(ids))


async def test_guides_are_followed(standin: Standin, model_folder: Path) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    assert isinstance(
        json.loads(await answer(standin, model_folder, "llguidance", json=json.dumps(schema)))["age"], int
    )
    assert await answer(standin, model_folder, "xgrammar", regex="(yes|no) sir") in ("yes sir", "no sir")
    assert await answer(standin, model_folder, "llguidance", grammar='start: "ba" | "ca"') in ("ba", "ca")


async def test_an_invalid_guide_fails_its_request(standin: Standin, model_folder: Path) -> None:
    with pytest.raises(standin.request_error, match="LLGuidance matcher error"):
        await answer(standin, model_folder, "llguidance", regex="(")
