"""One of several processes of the gateway: `python -m gateway.processes.child HOST:PORT`, started by `supervisor.py`.

Standard input brings the settings. It ends when the supervisor does, and then this process shuts down, too.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys

from contract.process_log import configure_logging, quiet_grpc
from gateway import polling

quiet_grpc()  # gRPC reads both when it is imported
polling.choose()

import uvloop  # noqa: E402
from motet import MotetError  # noqa: E402
from prometheus_client import values  # noqa: E402

from contract.redaction import redacted  # noqa: E402
from gateway.app import gateway_app  # noqa: E402
from gateway.config import GatewayConfig  # noqa: E402
from gateway.http.server import bound, serve  # noqa: E402
from gateway.http.siblings import Place  # noqa: E402


def main(address: str) -> int:
    """Serve at HOST:PORT until SIGTERM, or until the supervisor ends; the exit status."""
    supervisor = os.getppid()
    config: GatewayConfig
    place: Place
    try:
        config, place = pickle.load(sys.stdin.buffer)  # from the supervisor, which made it
    except (EOFError, pickle.UnpicklingError):  # nothing, or not all of it: the supervisor was killed meanwhile
        return 1
    configure_logging(config.http.log_level, log_format=config.http.log_format, process=f"gateway {place.index}")
    keep_metrics_in(place)
    try:
        listener = bound(config.http, address, is_shared=True)
        uvloop.run(serve(gateway_app(config, place), config.http, listener, leash=sys.stdin.fileno()))
    except (MotetError, OSError) as error:
        print(f"motet gateway: {redacted(str(error))}", file=sys.stderr)
        return 1
    finally:
        if os.getppid() != supervisor:  # killed: nobody else removes the folder. The last process leaves nothing of it
            shutil.rmtree(place.directory, ignore_errors=True)
    return 0


def keep_metrics_in(place: Place) -> None:
    """Let prometheus_client keep what this process counts in files that its siblings read. Call it before any metric.

    A process that takes the place of a dead one counts on where that one ended.
    """
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(place.metrics_dir)
    values.ValueClass = values.MultiProcessValue(lambda: place.index)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
