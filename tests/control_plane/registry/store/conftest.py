"""An object store on this machine for the tests of storages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control_plane.registry.store.buckets import s3_server


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url
