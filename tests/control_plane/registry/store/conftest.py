"""Object stores on this machine for the tests of storages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.control_plane.registry.store.buckets import cloud_urls


@pytest.fixture(scope="session")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A bucket of each scheme."""
    with cloud_urls(tmp_path_factory.mktemp("credentials")) as found:
        yield found


@pytest.fixture(params=["s3", "gs", "az"])
def bucket_url(urls: Mapping[str, str], request: pytest.FixtureRequest) -> str:
    """A bucket of every object store in turn."""
    return urls[request.param]
