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


def test_more_gpus_than_there_are(standin: Standin, set_up: SetUp) -> None:
    set_up(gpus=2)
    with pytest.raises(RuntimeError, match=r"Only 2 GPUs are available, but 4 are required\."):
        standin.llm(tensor_parallel_size=4)


def test_guided_decoding_needs_a_tokenizer(standin: Standin, model_folder: Path) -> None:
    """The error of the worker is the cause of what the constructor raises."""
    with pytest.raises(RuntimeError, match="Executor worker returned error") as caught:
        standin.llm(model_folder, guided_decoding_backend="xgrammar")
    assert isinstance(caught.value.__cause__, AssertionError)


# ----------------------------------------------------------------------------------------------------------- submission


def test_unknown_sampling_parameters_are_a_type_error(standin: Standin) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        standin.params(nonsense=1)
    with pytest.raises(AttributeError):
        standin.params().nonsense = 1
    with pytest.raises(ValueError, match="top_p"):
        standin.params(top_p=1.5)


def test_logprobs_are_limited_in_1_3(standin: Standin) -> None:
    if standin.version == "1.2":
        assert standin.params(logprobs=21).logprobs == 21
    else:
        with pytest.raises(ValueError, match="logprobs must be between 0 and 20"):
            standin.params(logprobs=21)


async def test_no_end_id_requires_a_tokenizer(standin: Standin) -> None:
    with pytest.raises(ValueError, match="tokenizer is required to reset end_id"):
        standin.llm().generate_async(PROMPT, standin.params(end_id=None))


async def test_a_prompt_longer_than_a_step_needs_chunked_prefill(standin: Standin) -> None:
    with pytest.raises(standin.request_error, match=r"prompt length \(9\.0\).*max_num_tokens \(8\)"):
        standin.llm(max_num_tokens=8).generate_async([1] * 9, standin.params())
    llm = standin.llm(max_num_tokens=32, enable_chunked_prefill=True)
    assert await tokens(llm.generate_async(list(range(100)), standin.params(max_tokens=3))) == [0, 1, 2]


@pytest.mark.parametrize("single_process", [False, True])
async def test_the_worker_refuses_when_the_result_is_read(
    standin: Standin, single_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a worker process the same error comes from generate_async."""
    if single_process:
        monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    llm, params = standin.llm(), standin.params(max_tokens=0)
    result = None if single_process else llm.generate_async(PROMPT, params, streaming=True)
    with pytest.raises(standin.request_error, match=r"`max_tokens` \(0\) must be greater than 0"):
        await anext(result or llm.generate_async(PROMPT, params, streaming=True))


async def test_a_token_beyond_the_vocabulary_fails_its_request_alone(standin: Standin, model_folder: Path) -> None:
    llm = standin.llm(model_folder)
    wrong = llm.generate_async([5, 100_000], standin.params())
    right = llm.generate_async(PROMPT, standin.params(max_tokens=2))
    with pytest.raises(standin.request_error, match="Token ID out of range"):
        await wrong
    assert await tokens(right) == [5, 6]


async def test_sampling_params_are_modified(standin: Standin) -> None:
    params = standin.params()
    await standin.llm(stream_interval=3).generate_async(PROMPT, params)
    assert params._stream_interval == 3


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


async def test_items_come_at_the_stream_interval(standin: Standin) -> None:
    result = standin.llm(stream_interval=4).generate_async(PROMPT, standin.params(max_tokens=10), streaming=True)
    assert [item.outputs[0].length async for item in result] == [1, 4, 8, 10]


async def test_thirty_two_tokens_by_default(standin: Standin) -> None:
    assert len(await tokens(standin.llm().generate_async(PROMPT, standin.package.SamplingParams(end_id=-1)))) == 32


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


async def test_the_end_token_stays_and_has_no_stop_reason(standin: Standin) -> None:
    output = (await standin.llm().generate_async(PROMPT, standin.params(end_id=7))).outputs[0]
    assert (list(output.token_ids), output.finish_reason, output.stop_reason) == ([5, 6, 7], "stop", None)


async def test_a_stop_token_is_removed_into_a_new_list(standin: Standin) -> None:
    result = standin.llm().generate_async(PROMPT, standin.params(stop_token_ids=[9, 7], logprobs=1), streaming=True)
    lists = [item.outputs[0].token_ids async for item in result]
    output = result.outputs[0]
    assert (lists[-1], output.finish_reason, output.stop_reason, len(output.logprobs)) == ([5, 6], "stop", 7, 3)
    assert lists[-1] is not lists[0]
    kept = standin.params(stop_token_ids=[7], include_stop_str_in_output=True)
    assert await tokens(standin.llm().generate_async(PROMPT, kept)) == [5, 6, 7]


async def test_length_takes_precedence_over_a_stop_token(standin: Standin) -> None:
    params = standin.params(stop_token_ids=[7], max_tokens=3)
    output = (await standin.llm().generate_async(PROMPT, params)).outputs[0]
    assert (list(output.token_ids), output.finish_reason, output.stop_reason) == ([5, 6, 7], "length", None)


async def test_ignore_eos_ignores_stop_tokens_in_1_3(standin: Standin) -> None:
    params = standin.params(end_id=6, ignore_eos=True, stop_token_ids=[7])
    expected = [5, 6] if standin.version == "1.2" else [5, 6, 7, 8] * 2
    assert await tokens(standin.llm().generate_async(PROMPT, params)) == expected


async def test_min_tokens_holds_off_ends(standin: Standin) -> None:
    params = standin.params(end_id=6, stop_token_ids=[8], min_tokens=4, max_tokens=20)
    output = (await standin.llm().generate_async(PROMPT, params)).outputs[0]
    assert (list(output.token_ids), output.finish_reason) == ([5, 7, 7, 5, 5, 6], "stop")


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


async def test_what_is_not_imitated_is_refused(standin: Standin) -> None:
    llm = standin.llm()
    with pytest.raises(standin.request_error, match="does not imitate return_context_logits"):
        await llm.generate_async(PROMPT, standin.params(return_context_logits=True))
    with pytest.raises(NotImplementedError, match="lora_request"):
        llm.generate_async(PROMPT, standin.params(), lora_request=object())


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


async def test_cached_prompt_tokens_have_no_logprobs(standin: Standin) -> None:
    llm = standin.llm(kv_cache_config={"tokens_per_block": 16})
    rows, cached = [], []
    for salt in ("a", "a", "b"):
        result = await llm.generate_async(LONG, standin.params(prompt_logprobs=1), cache_salt=salt)
        rows.append(len(result.outputs[0].prompt_logprobs))
        cached.append(result.cached_tokens)
    assert (rows, cached) == ([64, 16, 64], [0, 48, 0])


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


async def test_a_guide_without_a_backend_is_silently_ignored(standin: Standin) -> None:
    guide = standin.find("tensorrt_llm.llmapi", "GuidedDecodingParams")(regex="a")
    params = standin.params(guided_decoding=guide, max_tokens=3)
    assert await tokens(standin.llm().generate_async(PROMPT, params)) == [5, 6, 7]
