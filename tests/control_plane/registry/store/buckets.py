"""An S3 that moto serves on this machine, and storages of every kind for one set of tests.

Google's and Azure's are those of cloud_servers.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]  # ships no annotations
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from control_plane.registry.store.bucket import Bucket, memory_store, open_bucket
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.object_store import ObjectStore
from control_plane.registry.store.store import FencedStore
from tests.control_plane.registry.store.cloud_servers import azure_server, google_server

KINDS = ("directory", "memory", "s3", "gs", "az")
_numbers = itertools.count()


class NoFence:
    """Lets everybody in: a lease that failed, or a file system whose locks do not reach other machines."""

    is_sole = False

    def lock(self) -> None: ...

    def close(self) -> None: ...

    def check(self) -> None: ...


class _OneRequestAtATime:
    """moto as a WSGI application whose conditional writes are atomic, as those of S3 are.

    moto compares the tag and writes the object in two steps: of two writers with the same tag, both could win.
    """

    def __init__(self) -> None:
        self._application = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            return self._application(environ, start_response)


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a new bucket, which the environment leads to."""
    server = make_server("127.0.0.1", 0, _OneRequestAtATime(), threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "key")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            patch.setenv("AWS_REGION", "us-east-1")
            patch.setenv("AWS_ENDPOINT_URL", endpoint)
            patch.setenv("AWS_ALLOW_HTTP", "true")
            name = f"bucket-{next(_numbers)}"
            client = boto3.client("s3")
            client.create_bucket(Bucket=name)
            client.close()
            yield f"s3://{name}/adapters-of-tests"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def cloud_urls(directory: Path) -> Iterator[Mapping[str, str]]:
    """URLs of new buckets of every object store, by scheme. `directory` is for files of credentials."""
    with s3_server() as s3, google_server(directory) as gs, azure_server() as az:
        yield {"s3": s3, "gs": gs, "az": az}


def unfenced(kind: str, tmp_path: Path, urls: Mapping[str, str]) -> FencedStore:
    """One more view of one storage of this kind, beside which others may write."""
    if kind == "directory":
        (tmp_path / "store").mkdir(exist_ok=True)
        return DirectoryStore(tmp_path / "store", fence=NoFence())
    return ObjectStore(bucket_of(kind, tmp_path, urls), fence=NoFence())


def bucket_of(kind: str, tmp_path: Path, urls: Mapping[str, str]) -> Bucket:
    """The bucket of a test, with a prefix of its own."""
    if kind == "memory":
        return Bucket(memory_store(tmp_path.name), "pre/fix")
    return open_bucket(f"{urls[kind]}/{tmp_path.name}")
