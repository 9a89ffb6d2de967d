"""TrtllmService as published by the gateway's authors: same fields on the wire, same bytes.

The contract was recorded from the Python package smg-grpc-proto 0.4.28 (PyPI), generated from
crates/grpc_client/proto/{trtllm_service,common}.proto of lightseekorg/smg. DIGEST has the first 16 hex digits of the SHA-256 of
its description; REQUEST and RESPONSE are messages as the package's stubs write them.
"""

from __future__ import annotations

import hashlib
import json

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, ServiceDescriptor

from text_generation_proto.gateway import trtllm_service_pb2 as pb

DIGEST = "8b6fb580409f7206"
REQUEST = "0a027231120c0a026869120601ac02f0a2041a1a080110021800250000003f40074d0000803e50019d010000003e220608001001280128801030015a0608031202612b9801ffffffffffffffffff01a101000000000000f83faa01010aaa0102c3a9b201020203b80101ca010104d00101"
RESPONSE = "0a0272311a240a02050610011a0473746f70280330024210080515000000bf1a07080515000000bf6806"

_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


def describe(service: ServiceDescriptor) -> dict[str, list[str]]:
    """Return by full name the methods of a service, and the fields and values of all that it refers to, by number."""
    described: dict[str, list[str]] = {service.full_name: [_method(service, name) for name in service.methods_by_name]}
    to_do: list[Descriptor | EnumDescriptor] = [
        message for method in service.methods for message in (method.input_type, method.output_type)
    ]
    while to_do:
        descriptor = to_do.pop()
        if descriptor.full_name in described:
            continue
        if isinstance(descriptor, EnumDescriptor):
            described[descriptor.full_name] = [f"{value.number} {value.name}" for value in descriptor.values]
            continue
        fields = sorted(descriptor.fields, key=lambda field: field.number)
        described[descriptor.full_name] = [_field(field) for field in fields]
        to_do += [referred for field in fields if (referred := field.message_type or field.enum_type) is not None]
    return dict(sorted(described.items()))


def _method(service: ServiceDescriptor, name: str) -> str:
    method = service.methods_by_name[name]
    takes, returns = (
        "stream " * streams + message.full_name
        for streams, message in (
            (method.client_streaming, method.input_type),
            (method.server_streaming, method.output_type),
        )
    )
    return f"{name}({takes}) {returns}"


def _field(field: FieldDescriptor) -> str:
    referred = field.message_type or field.enum_type
    kind = _TYPES[field.type] if referred is None else f"{_TYPES[field.type]} {referred.full_name}"
    oneof = field.containing_oneof
    label = "repeated " if field.is_repeated else ""
    if oneof is not None:
        # proto3's `optional` is a oneof named after the field.
        label = "optional " if oneof.name == f"_{field.name}" else f"{oneof.name}: "
    return f"{field.number} {label}{kind} {field.name}"


def test_every_method_field_and_value_is_that_of_the_published_contract() -> None:
    described = json.dumps(describe(pb.DESCRIPTOR.services_by_name["TrtllmService"]), indent=1)
    assert hashlib.sha256(described.encode()).hexdigest()[:16] == DIGEST, described


def test_messages_have_the_published_bytes() -> None:
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
