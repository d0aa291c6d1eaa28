"""Watches of adapters: the request, the events, and how a watch that broke goes on."""

from __future__ import annotations

from typing import Any

from motet.calls import resource_name
from motet.types import AdapterEvent, AdapterEventKind
from motet.v1 import residency_pb2
from motet.wire import adapter_from, placements_from

WATCH = "/motet.v1.AdapterResidencyService/WatchAdapters"
_KINDS = {
    getattr(residency_pb2, f"ADAPTER_CHANGE_KIND_{kind.name}"): kind
    for kind in AdapterEventKind
    if kind.name not in ("RESYNC", "SYNCED", "MOVED")
}


def watch_request(name: str, resume_token: str, *, with_residency: bool) -> residency_pb2.WatchAdaptersRequest:
    """A watch of one adapter, or of all for an empty name."""
    return residency_pb2.WatchAdaptersRequest(
        name=resource_name(name) if name else "", resume_token=resume_token, with_residency=with_residency
    )


def watch_method(channel: Any) -> Any:
    """The method of a channel of grpc or grpc.aio."""
    return channel.unary_stream(
        WATCH,
        request_serializer=residency_pb2.WatchAdaptersRequest.SerializeToString,
        response_deserializer=residency_pb2.WatchAdaptersResponse.FromString,
    )


def event_from(message: residency_pb2.WatchAdaptersResponse) -> AdapterEvent:
    """One event."""
    token = message.resume_token
    match message.WhichOneof("event"):
        case "resync":
            return AdapterEvent(AdapterEventKind.RESYNC, reason=message.resync.reason, resume_token=token)
        case "synced":
            return AdapterEvent(AdapterEventKind.SYNCED, resume_token=token)
        case "change":
            kind = _KINDS.get(message.change.kind, AdapterEventKind.UNSPECIFIED)
            adapter_id = message.change.adapter.name.removeprefix("adapters/")
            is_gone = kind is AdapterEventKind.DELETED
            adapter = None if is_gone else adapter_from(message.change.adapter)
            return AdapterEvent(kind, adapter_id, adapter, resume_token=token)
        case "residency":
            return AdapterEvent(
                AdapterEventKind.MOVED,
                message.residency.adapter.removeprefix("adapters/"),
                digest=message.residency.digest,
                placements=placements_from(message.residency.placements),
                resume_token=token,
            )
    return AdapterEvent(AdapterEventKind.UNSPECIFIED, resume_token=token)
