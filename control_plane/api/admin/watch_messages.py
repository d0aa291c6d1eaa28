"""Events of a watch as messages."""

from __future__ import annotations

from motet.v1 import adapters_pb2, residency_pb2

from control_plane.adapters.watch.watch import Changed, ChangeKind, Event, Moved, Resync, Synced
from control_plane.api import wire

_KINDS = {kind: getattr(residency_pb2, f"ADAPTER_CHANGE_KIND_{kind.name}") for kind in ChangeKind}


def watch_message(token: str, event: Event) -> residency_pb2.WatchAdaptersResponse:
    """One event for the current caller. Of an adapter that it does not see any more, no more than name and uid."""
    response = residency_pb2.WatchAdaptersResponse(resume_token=token)
    match event:
        case Resync(reason):
            response.resync.reason = reason
        case Synced():
            response.synced.SetInParent()
        case Changed(kind, record):
            response.change.kind = _KINDS[kind]
            if kind is ChangeKind.DELETED:
                gone = adapters_pb2.Adapter(name=f"adapters/{record.adapter_id}", uid=record.uid)
                response.change.adapter.CopyFrom(gone)
            else:
                response.change.adapter.CopyFrom(wire.adapter_message(record))
        case Moved(record, placements):
            response.residency.adapter = f"adapters/{record.adapter_id}"
            response.residency.digest = record.active_digest
            response.residency.placements.extend(wire.placement_messages(placements))
    return response
