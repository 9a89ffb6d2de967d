"""The stand-in for tensorrt_llm: what is refused and when, and how results are read. Its sources are named beside its code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from standin_loading import Standin

PROMPT = [5, 6, 7, 8]
SetUp = Callable[..., None]


async def snapshots(result: Any) -> list[list[int]]:  # noqa: ANN401 - a RequestOutput
    """What its first sequence's tokens are after each item."""
    return [list(item.outputs[0].token_ids) async for item in result]


async def tokens(result: Any) -> list[int]:  # noqa: ANN401 - a RequestOutput
    """Its first sequence's tokens, at the end."""
    return list((await result).outputs[0].token_ids)


class TestRefusedAtOnce:
    def test_a_keyword_that_the_constructor_does_not_know(self, standin: Standin) -> None:
        with pytest.raises(ValueError, match="LLM got invalid argument: nonsense"):
            standin.llm(nonsense=1)

    def test_a_keyword_of_the_other_backend(self, old: Standin) -> None:
        with pytest.raises(
            ValueError, match=r"specific to TensorRT backend.*normalize_log_probs(.|\n)*_tensorrt_engine"
        ):
            old.llm(normalize_log_probs=True)

    @pytest.mark.parametrize("name", ["sampler_type", "disable_flashinfer_sampling", "enable_sleep"])
    def test_a_keyword_that_is_gone(self, new: Standin, name: str) -> None:
        with pytest.raises(ValueError, match=f"LLM got invalid argument: {name}"):
            new.llm(**{name: "auto"})

    def test_a_field_that_a_configuration_does_not_know(self, standin: Standin) -> None:
        with pytest.raises(ValueError, match="Extra inputs are not permitted"):
            standin.llm(kv_cache_config={"nonsense": 1})

    def test_more_gpus_than_there_are(self, standin: Standin, set_up: SetUp) -> None:
        set_up(gpus=2)
        with pytest.raises(RuntimeError, match=r"Only 2 GPUs are available, but 4 are required\."):
            standin.llm(tensor_parallel_size=4)

    def test_sampling_parameters_that_are_not_known(self, standin: Standin) -> None:
        with pytest.raises(TypeError, match="nonsense"):
            standin.params(nonsense=1)
        with pytest.raises(AttributeError):
            standin.params().nonsense = 1

    @pytest.mark.parametrize(
        "wrong",
        [
            {"top_p": 1.5},
            {"top_k": -1},
            {"temperature": -0.1},
            {"n": 3, "best_of": 2},
            {"n": 2},
            {"truncate_prompt_tokens": 0},
        ],
        ids=str,
    )
    def test_sampling_parameters_out_of_range(self, standin: Standin, wrong: dict[str, object]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong)) if "n" not in wrong else "best_of"):
            standin.params(**wrong)

    @pytest.mark.parametrize("value", [{"max_tokens": 0}, {"repetition_penalty": -3.0}, {"seed": -1}], ids=str)
    def test_what_is_not_looked_at(self, standin: Standin, value: dict[str, object]) -> None:
        standin.params(**value)

    def test_logprobs_have_a_cap_only_on_main(self, standin: Standin) -> None:
        if standin.version == "1.2":
            assert standin.params(logprobs=21).logprobs == 21
        else:
            with pytest.raises(ValueError, match="logprobs must be between 0 and 20"):
                standin.params(logprobs=21)

    def test_two_guides(self, standin: Standin) -> None:
        guide = standin.find("tensorrt_llm.llmapi", "GuidedDecodingParams")
        with pytest.raises(ValueError, match="Only one guide can be used for a request"):
            standin.params(guided_decoding=guide(regex="a", json_object=True))

    async def test_no_end_and_no_tokenizer_to_tell(self, standin: Standin) -> None:
        llm = standin.llm()
        with pytest.raises(ValueError, match="tokenizer is required to reset end_id"):
            llm.generate_async(PROMPT, standin.params(end_id=None))
        with pytest.raises(ValueError, match="tokenizer is required to reset end_id"):
            llm.generate_async(PROMPT)

    async def test_wrong_types(self, standin: Standin) -> None:
        llm = standin.llm()
        with pytest.raises(TypeError, match="must be type SamplingParams or None"):
            llm.generate_async(PROMPT, {"max_tokens": 3})
        with pytest.raises(TypeError, match="must be type str or list of int"):
            llm.generate_async(7, standin.params())
        with pytest.raises(IndexError):
            llm.generate_async([], standin.params())
        with pytest.raises(AssertionError):
            llm.generate_async(list(np.array([1, 2])), standin.params())

    async def test_a_prompt_that_fits_in_no_step(self, standin: Standin) -> None:
        llm = standin.llm(max_num_tokens=8)
        with pytest.raises(standin.request_error, match=r"prompt length \(9\.0\).*max_num_tokens \(8\)"):
            llm.generate_async([1] * 9, standin.params())

    async def test_and_with_chunked_prefill_it_fits(self, standin: Standin) -> None:
        llm = standin.llm(max_num_tokens=32, enable_chunked_prefill=True)
        assert await tokens(llm.generate_async(list(range(100)), standin.params(max_tokens=3))) == [0, 1, 2]

    async def test_everything_after_a_shutdown(self, standin: Standin) -> None:
        llm = standin.llm()
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(RuntimeError, match="LLM is shutting down"):
            llm.generate_async(PROMPT, standin.params())
        with pytest.raises(AttributeError):
            llm.get_stats()
        assert not llm._check_health()


class TestRefusedByTheWorker:
    """Errors that come from iteration – or from generate_async, where there is no worker process."""

    WRONG = (
        ({"max_tokens": 0}, r"`max_tokens` \(0\) must be greater than 0"),
        ({"stop": "x"}, "is not processed by tokenizer"),
        ({"bad": ["x"]}, "is not processed by tokenizer"),
    )

    @pytest.mark.parametrize(("wrong", "says"), WRONG, ids=str)
    async def test_from_iteration(self, standin: Standin, wrong: dict[str, object], says: str) -> None:
        result = standin.llm().generate_async(PROMPT, standin.params(**wrong), streaming=True)
        with pytest.raises(standin.request_error, match=says):
            await anext(result)

    @pytest.mark.parametrize(("wrong", "says"), WRONG, ids=str)
    async def test_from_the_submission(
        self, standin: Standin, wrong: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
        llm = standin.llm(max_seq_len=99)
        with pytest.raises(standin.request_error, match=says):
            llm.generate_async(PROMPT, standin.params(**wrong), streaming=True)
        assert llm._executor.max_seq_len == 99

    async def test_a_prompt_as_long_as_a_sequence(self, standin: Standin) -> None:
        with pytest.raises(standin.request_error, match=r"must be greater than 0"):
            await standin.llm(max_seq_len=4).generate_async(PROMPT, standin.params())

    async def test_a_token_beyond_the_vocabulary_fails_its_request_alone(
        self, standin: Standin, model_folder: Path
    ) -> None:
        llm = standin.llm(model_folder)
        wrong = llm.generate_async([5, 100_000], standin.params())
        right = llm.generate_async(PROMPT, standin.params(max_tokens=2))
        with pytest.raises(standin.request_error, match="Token ID out of range"):
            await wrong
        assert await tokens(right) == [5, 6]

    async def test_another_beam_width_than_the_engines(self, standin: Standin) -> None:
        result = standin.llm().generate_async(PROMPT, standin.params(use_beam_search=True, best_of=2))
        with pytest.raises(standin.request_error, match="Request beam width 2 is not equal to max_beam_width 1"):
            await result


class TestReading:
    async def test_one_object_and_one_list_that_grows(self, standin: Standin) -> None:
        result = standin.llm().generate_async(
            {"prompt_token_ids": PROMPT}, standin.params(max_tokens=6), streaming=True
        )
        items, lists = [], []
        async for item in result:
            items.append(item)
            lists.append(item.outputs[0].token_ids)
        assert all(item is result for item in items)
        assert all(tokens is lists[0] for tokens in lists)
        assert lists[0] == [5, 6, 7, 8, 5, 6]
        assert (len(items), result.finished, result.outputs[0].finish_reason) == (6, True, "length")

    async def test_each_item_ends_where_the_echo_stands(self, standin: Standin) -> None:
        result = standin.llm().generate_async(PROMPT, standin.params(max_tokens=3), streaming=True)
        assert await snapshots(result) == [[5], [5, 6], [5, 6, 7]]

    async def test_unless_told_otherwise_thirty_two_tokens(self, standin: Standin) -> None:
        params = standin.package.SamplingParams(end_id=-1)
        assert len(await tokens(standin.llm().generate_async(PROMPT, params))) == 32

    async def test_more_than_there_is_room_for_is_cut_in_silence(self, standin: Standin) -> None:
        result = await standin.llm(max_seq_len=10).generate_async(PROMPT, standin.params(max_tokens=1000))
        assert (len(result.outputs[0].token_ids), result.outputs[0].finish_reason) == (6, "length")

    async def test_the_kv_cache_limits_the_length_too(self, standin: Standin) -> None:
        llm = standin.llm(kv_cache_config={"max_tokens": 64, "tokens_per_block": 32}, max_seq_len=4096)
        assert len(await tokens(llm.generate_async(PROMPT, standin.params(max_tokens=None)))) == 60

    async def test_without_streaming_there_is_one_item(self, standin: Standin) -> None:
        assert await snapshots(standin.llm().generate_async(PROMPT, standin.params(max_tokens=3))) == [[5, 6, 7]]

    async def test_items_come_at_the_interval_and_at_both_ends(self, standin: Standin) -> None:
        result = standin.llm(stream_interval=4).generate_async(PROMPT, standin.params(max_tokens=10), streaming=True)
        assert [len(item) for item in await snapshots(result)] == [1, 4, 8, 10]

    async def test_the_interval_can_be_set_from_outside(self, standin: Standin, set_up: SetUp) -> None:
        set_up(stream_interval=4, tokens_per_step=2)
        result = standin.llm().generate_async(PROMPT, standin.params(max_tokens=20), streaming=True)
        assert [len(item) for item in await snapshots(result)] == [2, 8, 16, 20]

    async def test_several_tokens_in_a_step(self, standin: Standin, set_up: SetUp) -> None:
        set_up(tokens_per_step=3)
        result = standin.llm().generate_async(PROMPT, standin.params(max_tokens=7), streaming=True)
        assert [len(item) for item in await snapshots(result)] == [3, 6, 7]

    async def test_sequences_of_one_request_end_each_for_itself(self, standin: Standin) -> None:
        params = standin.params(n=2, temperature=1.0, max_tokens=30)
        result = standin.llm().generate_async(PROMPT, params, streaming=True)
        lengths, finished, claimed, reasons = [], [], [], []
        async for item in result:
            lengths.append([output.length for output in item.outputs])
            finished.append(item.finished)
            reasons.append([output.finish_reason for output in item.outputs])
            claimed.append(sum(bool(output.token_ids_diff) for output in item.outputs))
        assert finished == [False] * (len(finished) - 1) + [True]
        assert reasons[-2:] == [["length", None], ["length", "length"]]
        # Each item is of one sequence; and yet both say that they have something new.
        assert all(sum(new) - sum(before) <= 1 for before, new in pairwise(lengths))
        assert max(claimed) == 2

    async def test_an_object_for_each_request_and_none_made_by_hand(self, standin: Standin) -> None:
        with pytest.raises(RuntimeError, match="RequestOutput is designed to be"):
            standin.find("tensorrt_llm.llmapi", "RequestOutput")()

    def test_without_a_loop_it_is_read_synchronously(self, standin: Standin) -> None:
        llm = standin.llm()
        assert list(llm.generate(PROMPT, standin.params(max_tokens=2)).outputs[0].token_ids) == [5, 6]
        pair = llm.generate([PROMPT, [9]], standin.params(max_tokens=2))
        assert [list(output.outputs[0].token_ids) for output in pair] == [[5, 6], [9, 9]]
        assert [
            item.outputs[0].length for item in llm.generate_async(PROMPT, standin.params(), streaming=True)
        ] == list(range(1, 9))

    def test_a_result_made_without_a_loop_cannot_be_awaited(self, standin: Standin) -> None:
        result = standin.llm().generate_async(PROMPT, standin.params())

        async def read() -> None:
            await result

        with pytest.raises(AssertionError, match="event loop was not present"):
            asyncio.run(read())

    async def test_once_read_synchronously_it_cannot_be_awaited(self, standin: Standin) -> None:
        result = standin.llm().generate_async(PROMPT, standin.params(), streaming=True)
        next(result)
        with pytest.raises(Exception, match="mixing of synchronous and asynchronous"):
            await anext(result)

    async def test_results_of_two_loops_wake_only_the_firsts_readers(self, standin: Standin, set_up: SetUp) -> None:
        set_up(step_ms=1)
        llm = standin.llm()
        first = llm.generate_async(PROMPT, standin.params(max_tokens=20_000), streaming=True)
        await anext(first)

        async def read_on_another_loop() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(llm.generate_async(PROMPT, standin.params(max_tokens=2)), 0.2)

        await asyncio.to_thread(asyncio.run, read_on_another_loop())
        first.abort()
        await first

    def test_time_to_wait_is_kept_only_on_main(self, standin: Standin, set_up: SetUp) -> None:
        set_up(step_ms=20)
        result = standin.llm().generate_async(PROMPT, standin.params(max_tokens=5))
        if standin.version == "1.2":
            assert result.result(timeout=0.001).outputs[0].length == 5
        else:
            with pytest.raises(TimeoutError):
                result.result(timeout=0.001)


class TestEnds:
    async def test_the_end_token_stays_and_has_no_reason(self, standin: Standin) -> None:
        output = (await standin.llm().generate_async(PROMPT, standin.params(end_id=7))).outputs[0]
        assert (list(output.token_ids), output.finish_reason, output.stop_reason) == ([5, 6, 7], "stop", None)

    async def test_a_stop_token_is_cut_off_and_named(self, standin: Standin) -> None:
        params = standin.params(stop_token_ids=[9, 7], logprobs=1)
        result = standin.llm().generate_async(PROMPT, params, streaming=True)
        lists = [item.outputs[0].token_ids async for item in result]
        output = result.outputs[0]
        assert (lists[-1], output.finish_reason, output.stop_reason) == ([5, 6], "stop", 7)
        assert lists[-1] is not lists[0]
        assert len(output.logprobs) == 3

    async def test_a_stop_token_stays_if_it_is_asked_for(self, standin: Standin) -> None:
        params = standin.params(stop_token_ids=[7], include_stop_str_in_output=True, logprobs=1)
        output = (await standin.llm().generate_async(PROMPT, params)).outputs[0]
        assert (list(output.token_ids), output.stop_reason, len(output.logprobs)) == ([5, 6, 7], 7, 3)

    async def test_the_list_shrinks_when_a_longer_stop_is_cut_off(self, standin: Standin, model_folder: Path) -> None:
        llm = standin.llm(model_folder, skip_tokenizer_init=False)
        prompt = llm.tokenizer.encode("wxyz", add_special_tokens=False)
        params = standin.params(end_id=None, stop=["yz"])
        result = llm.generate_async(prompt, params, streaming=True)
        assert [len(item) for item in await snapshots(result)] == [1, 2, 3, 2]
        assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", "yz")

    async def test_a_stop_that_is_the_last_token_allowed_ends_it_by_length(self, standin: Standin) -> None:
        output = (await standin.llm().generate_async(PROMPT, standin.params(stop_token_ids=[7], max_tokens=3))).outputs[
            0
        ]
        assert (list(output.token_ids), output.finish_reason, output.stop_reason) == ([5, 6, 7], "length", None)

    async def test_ignoring_the_end_ignores_stops_only_on_main(self, standin: Standin) -> None:
        params = standin.params(end_id=6, ignore_eos=True, stop_token_ids=[7])
        output = (await standin.llm().generate_async(PROMPT, params)).outputs[0]
        assert list(output.token_ids) == ([5, 6] if standin.version == "1.2" else [5, 6, 7, 8] * 2)

    async def test_the_models_other_ends_become_stops_only_if_no_end_is_given(
        self, standin: Standin, model_folder: Path
    ) -> None:
        llm = standin.llm(model_folder, skip_tokenizer_init=False)
        left_out, given = standin.params(end_id=None), standin.params(end_id=0)
        assert await tokens(llm.generate_async([5, 1, 6], left_out)) == [5]
        assert (left_out.end_id, left_out.pad_id, left_out.stop_token_ids) == (0, 0, [1])
        assert (await tokens(llm.generate_async([5, 1, 6], given)))[:3] == [5, 1, 6]
        assert given.stop_token_ids is None

    async def test_even_parameters_with_an_end_are_changed(self, standin: Standin) -> None:
        params = standin.params()
        await standin.llm(stream_interval=3).generate_async(PROMPT, params)
        assert params._stream_interval == 3

    async def test_text_where_there_is_a_tokenizer(self, standin: Standin, model_folder: Path) -> None:
        llm = standin.llm(model_folder, skip_tokenizer_init=False)
        result = await llm.generate_async("hello", standin.package.SamplingParams(max_tokens=7))
        assert result.outputs[0].text == "hellohe"
