"""How far the server has come with files that it downloads for a registration, as its operation says."""

from __future__ import annotations

from collections.abc import Callable

from google.longrunning import operations_pb2

from motet.uploads import Progress
from motet.v1 import adapters_pb2


def download_progress(progress: Progress | None) -> Callable[[operations_pb2.Operation], None]:
    """What `wait_operation` calls with every state of the operation; it calls `progress` when the bytes changed.

    Not before the size of the download is known, and never where nothing is downloaded.
    """
    last = (0, 0)

    def on_state(operation: operations_pb2.Operation) -> None:
        nonlocal last
        metadata = adapters_pb2.AdapterOperationMetadata()
        if progress is None or not operation.metadata.Unpack(metadata):
            return
        present = (metadata.bytes_done, metadata.bytes_total)
        if metadata.bytes_total and present != last:
            last = present
            progress(*present)

    return on_state
