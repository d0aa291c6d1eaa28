"""An S3 that moto serves on this machine, and storages of every kind for one set of tests.

Google's and Azure's are those of cloud_servers.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import boto3  # type: ignore[import-untyped]  # ships no annotations
import pytest
from moto.server import ThreadedMotoServer

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


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a new bucket, which the environment leads to."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
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
        server.stop()


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
