"""A service as its descriptors have it, and all that its messages refer to, in lines that can be compared and read."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, ServiceDescriptor

_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


def describe(service: ServiceDescriptor) -> dict[str, list[str]]:
    """By full name: a service's methods, messages' fields and enums' values, in the order of their numbers."""
    described: dict[str, list[str]] = {service.full_name: [_method(service, name) for name in service.methods_by_name]}
    to_do: list[Descriptor | EnumDescriptor] = [
        message for method in service.methods for message in (method.input_type, method.output_type)
    ]
    while to_do:
        one = to_do.pop()
        if one.full_name in described:
            continue
        if isinstance(one, EnumDescriptor):
            described[one.full_name] = [f"{value.number} {value.name}" for value in one.values]
            continue
        described[one.full_name] = [_field(field) for field in sorted(one.fields, key=lambda field: field.number)]
        to_do += [referred for field in one.fields if (referred := field.message_type or field.enum_type) is not None]
    return dict(sorted(described.items()))


def _method(service: ServiceDescriptor, name: str) -> str:
    method = service.methods_by_name[name]
    asked, answered = (
        "stream " * streams + message.full_name
        for streams, message in (
            (method.client_streaming, method.input_type),
            (method.server_streaming, method.output_type),
        )
    )
    return f"{name}({asked}) {answered}"


def _field(field: FieldDescriptor) -> str:
    referred = field.message_type or field.enum_type
    kind = _TYPES[field.type] if referred is None else f"{_TYPES[field.type]} {referred.full_name}"
    oneof = field.containing_oneof
    label = "repeated " if field.is_repeated else ""
    if oneof is not None:
        # proto3's `optional` is a oneof of its own, that is called like the field.
        label = "optional " if oneof.name == f"_{field.name}" else f"{oneof.name}: "
    return f"{field.number} {label}{kind} {field.name}"
