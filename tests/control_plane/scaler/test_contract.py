"""The scaler speaks KEDA's interface: its package, methods and field numbers, and what KEDA's own bytes mean.

The table is that of externalscaler.proto in github.com/kedacore/keda (pkg/scalers/externalscaler), from which KEDA is
built.
"""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor

from control_plane.scaler.v1 import externalscaler_pb2 as keda

KIND = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_DOUBLE: "double",
}
MESSAGES = {
    "ScaledObjectRef": {
        "name": (1, "string"),
        "namespace": (2, "string"),
        "scalerMetadata": (3, "ScalerMetadataEntry"),
    },
    "IsActiveResponse": {"result": (1, "bool")},
    "GetMetricSpecResponse": {"metricSpecs": (1, "MetricSpec")},
    "MetricSpec": {"metricName": (1, "string"), "targetSize": (2, "int64"), "targetSizeFloat": (3, "double")},
    "GetMetricsRequest": {"scaledObjectRef": (1, "ScaledObjectRef"), "metricName": (2, "string")},
    "GetMetricsResponse": {"metricValues": (1, "MetricValue")},
    "MetricValue": {"metricName": (1, "string"), "metricValue": (2, "int64"), "metricValueFloat": (3, "double")},
}
METHODS = {  # request, response, whether responses are a stream
    "IsActive": ("ScaledObjectRef", "IsActiveResponse", False),
    "StreamIsActive": ("ScaledObjectRef", "IsActiveResponse", True),
    "GetMetricSpec": ("ScaledObjectRef", "GetMetricSpecResponse", False),
    "GetMetrics": ("GetMetricsRequest", "GetMetricsResponse", False),
}


def test_messages_have_the_fields_of_kedas() -> None:
    found = {
        name: {
            field.name: (field.number, field.message_type.name if field.message_type else KIND[field.type])
            for field in message.fields
        }
        for name, message in keda.DESCRIPTOR.message_types_by_name.items()
    }
    assert found == MESSAGES


def test_the_service_has_the_methods_of_kedas() -> None:
    service = keda.DESCRIPTOR.services_by_name["ExternalScaler"]
    assert service.full_name == "externalscaler.ExternalScaler"
    found = {
        method.name: (method.input_type.name, method.output_type.name, method.server_streaming)
        for method in service.methods
    }
    assert found == METHODS
    assert not any(method.client_streaming for method in service.methods)


def test_a_call_in_kedas_bytes_is_understood() -> None:
    """Written by hand, as KEDA's Go code writes it: field 1 `motet-worker`, 2 `motet`, 3 one pair of the metadata."""
    pair = b"\x0a\x0fmotetTargetLoad\x12\x030.5"
    written = b"\x0a\x0cmotet-worker\x12\x05motet\x1a" + bytes([len(pair)]) + pair
    read = keda.ScaledObjectRef.FromString(written)
    assert (read.name, read.namespace, dict(read.scalerMetadata)) == (
        "motet-worker",
        "motet",
        {"motetTargetLoad": "0.5"},
    )
