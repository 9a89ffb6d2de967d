"""Our .proto files are those that gateways were built with, as far as the wire can tell."""

from __future__ import annotations

from gateway_published import PUBLISHED, REQUEST, RESPONSE
from gateway_wire import describe

from text_generation_proto.gateway import trtllm_service_pb2 as pb


def test_every_method_field_and_value_is_that_of_the_published_contract() -> None:
    ours = describe(pb.DESCRIPTOR.services_by_name["TrtllmService"])
    assert list(ours) == list(PUBLISHED)
    for name, lines in PUBLISHED.items():
        assert ours[name] == lines, name


def test_messages_of_the_published_package_are_read_and_written_byte_for_byte() -> None:
    request = pb.GenerateRequest.FromString(bytes.fromhex(REQUEST))
    assert request == pb.GenerateRequest(
        request_id="r1",
        tokenized=pb.TokenizedInput(original_text="hi", input_token_ids=[1, 300, 70000]),
        sampling_config=pb.SamplingConfig(
            beam_width=1,
            num_return_sequences=2,
            top_k=0,
            top_p=0.5,
            seed=7,
            temperature=0.25,
            min_tokens=1,
            min_p=0.125,
        ),
        output_config=pb.OutputConfig(logprobs=0, prompt_logprobs=1, exclude_input_from_output=True),
        max_tokens=2048,
        streaming=True,
        guided_decoding=pb.GuidedDecodingParams(guide_type=pb.GuidedDecodingParams.GUIDE_TYPE_REGEX, guide="a+"),
        cache_salt_id=-1,
        arrival_time=1.5,
        stop=["\n", "é"],
        stop_token_ids=[2, 3],
        ignore_eos=True,
        bad_token_ids=[4],
        include_stop_token_in_output=True,
    )
    assert request.SerializeToString(deterministic=True).hex() == REQUEST
    response = pb.GenerateResponse.FromString(bytes.fromhex(RESPONSE))
    assert response == pb.GenerateResponse(
        request_id="r1",
        complete=pb.GenerateComplete(
            output_token_ids=[5, 6],
            sequence_index=1,
            finish_reason="stop",
            matched_token_id=6,
            prompt_tokens=3,
            completion_tokens=2,
            logprobs=[
                pb.TokenLogprob(token_id=5, logprob=-0.5, top_logprobs=[pb.TopLogprob(token_id=5, logprob=-0.5)])
            ],
        ),
    )
    assert response.SerializeToString(deterministic=True).hex() == RESPONSE
