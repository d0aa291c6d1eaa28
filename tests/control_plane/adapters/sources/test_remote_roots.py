"""Adapters from a fake Hub and from object stores: what is read, resumed, refused, and where it may lead."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.adapters.sources.adapter_source import RemoteRoots
from control_plane.adapters.sources.hub import Hub, open_hub
from control_plane.adapters.sources.locations import remote_root
from control_plane.adapters.sources.partial_files import KEPT_S, PartialFiles
from control_plane.adapters.sources.progress import Progress
from control_plane.adapters.sources.remote_adapter import TryLater
from control_plane.errors import InvalidRequest, MotetError, PathNotAllowed, StoreUnavailable
from control_plane.registry.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from control_plane.registry.store.bucket import open_bucket
from control_plane.registry.store.store import StoreUrlError, replace
from tests.control_plane.adapters.sources.fake_hub import FakeHub
from tests.control_plane.registry.store.buckets import cloud_urls

FILES = {CONFIG_FILE: b'{"r": 8}', WEIGHTS_FILE: os.urandom(700_000), "README.md": b"hello"}
MEMBERS = (CONFIG_FILE, WEIGHTS_FILE)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with FakeHub().running() as fake:
        fake.push("acme/poet", FILES)
        yield fake


def roots(tmp_path: Path, hub: FakeHub | None = None, *, max_bytes: int = 1 << 20, **urls: str) -> RemoteRoots:
    found = Hub() if hub is None else Hub(hub.url, (hub.cdn.removeprefix("http://"),), timeout_s=20.0)
    named = {name: remote_root(name, url) for name, url in (urls or {"models": "hf://acme"}).items()}
    partial = PartialFiles(tmp_path / "downloads", max_kept_bytes=1 << 22)
    return RemoteRoots(named, partial, max_bytes=max_bytes, hub=found, first_wait_s=0.0)


async def read(remote: RemoteRoots, source: str, progress: Progress | None = None) -> tuple[dict[str, bytes], str]:
    found = remote.find(source)
    assert found is not None
    async with found.open(progress or Progress()) as files:
        return {name: path.read_bytes() for name, path in files.files.items()}, files.source


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "downloads").glob("*/*"))


async def test_a_revision_is_resolved_once_and_only_the_adapters_files_are_read(tmp_path: Path, hub: FakeHub) -> None:
    progress = Progress()
    commit = hub.revisions["acme/poet", "main"]
    files, source = await read(roots(tmp_path, hub), "models/poet@main", progress)
    assert files == {name: FILES[name] for name in MEMBERS} and source == f"models/poet@{commit}"
    total = sum(len(FILES[name]) for name in MEMBERS)
    assert (progress.phase, progress.bytes_done, progress.bytes_total) == ("check", total, total)
    assert all(commit in path for _, path, _, _ in hub.requests[1:]) and kept(tmp_path) == []
    moved = hub.push("acme/poet", FILES | {CONFIG_FILE: b"{}"})
    assert (await read(roots(tmp_path, hub), "models/poet"))[1] == f"models/poet@{moved}"
    assert (await read(roots(tmp_path, hub), f"models/poet@{commit}"))[1] == f"models/poet@{commit}"


async def test_the_token_goes_to_the_hub_and_to_no_other_host(tmp_path: Path, hub: FakeHub) -> None:
    await read(roots(tmp_path, hub), "models/poet")
    tokens = {host: token for host, _, _, token in hub.requests}
    assert tokens == {hub.url: "Bearer hf_secret", hub.cdn: None}


async def test_folders_of_a_repository_and_roots_that_are_one(tmp_path: Path, hub: FakeHub) -> None:
    hub.push("acme/many", {f"a/b/{name}": data for name, data in FILES.items()}, "refs/pr/1")
    for url, source in (("hf://acme", "r/many/a/b@refs/pr/1"), ("hf://acme/many", "r/a/b@refs/pr/1")):
        assert set((await read(roots(tmp_path, hub, r=url), source))[0]) == set(MEMBERS)
    assert set((await read(roots(tmp_path, hub, r="hf://acme/many/a/b"), "r@refs/pr/1"))[0]) == set(MEMBERS)


@pytest.mark.parametrize("faults", [[429, 503], ["truncate", "truncate"], [200, "truncate", "whole"], [200, "damage"]])
async def test_a_broken_download_goes_on(tmp_path: Path, hub: FakeHub, faults: list[int | str]) -> None:
    hub.faults = faults
    assert (await read(roots(tmp_path, hub), "models/poet"))[0][WEIGHTS_FILE] == FILES[WEIGHTS_FILE]
    assert hub.faults == []


async def test_the_next_registration_goes_on_where_a_failed_one_ended(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults = [200, "truncate", *[503] * 6]
    with pytest.raises(StoreUnavailable, match=r"'models/poet'.*503.*register it again to go on"):
        await read(roots(tmp_path, hub), "models/poet")
    assert kept(tmp_path) == sorted(MEMBERS)
    hub.requests.clear()
    assert (await read(roots(tmp_path, hub), "models/poet"))[0][WEIGHTS_FILE] == FILES[WEIGHTS_FILE]
    ranges = [wanted for _, path, wanted, _ in hub.requests if path.endswith(WEIGHTS_FILE)]
    assert ranges and set(ranges) == {f"bytes={len(FILES[WEIGHTS_FILE]) // 2}-"} and kept(tmp_path) == []


async def test_what_was_damaged_meanwhile_is_read_again(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults = [200, "truncate", *[503] * 6]
    with pytest.raises(StoreUnavailable):
        await read(roots(tmp_path, hub), "models/poet")
    (part,) = (tmp_path / "downloads").glob(f"*/{WEIGHTS_FILE}")
    part.write_bytes(bytes(part.stat().st_size))
    assert (await read(roots(tmp_path, hub), "models/poet"))[0][WEIGHTS_FILE] == FILES[WEIGHTS_FILE]


async def test_a_hub_that_sends_other_bytes_is_refused(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults = [200, "damage", "damage"]
    with pytest.raises(StoreUnavailable, match="not what the Hub lists"):
        await read(roots(tmp_path, hub), "models/poet")


COMMIT = '"sha": "' + "a" * 40 + '"'


@pytest.mark.parametrize(
    "listed",
    [
        "",
        "null",
        "[]",
        "{}",
        "[" * 100_000,
        "\xff",
        '{"sha": 5, "siblings": []}',
        '{"sha": "main", "siblings": []}',
        "{" + COMMIT + "}",
        "{" + COMMIT + ', "siblings": 7}',
        "{" + COMMIT + ', "siblings": [null]}',
        "{" + COMMIT + ', "siblings": ["adapter_config.json"]}',
        "{" + COMMIT + ', "siblings": [{"rfilename": 5, "size": 1, "blobId": "b"}]}',
        "{" + COMMIT + ', "siblings": [{"rfilename": "adapter_config.json", "size": -1, "blobId": "b"}]}',
        "{" + COMMIT + ', "siblings": [{"rfilename": "adapter_config.json", "size": "1", "blobId": "b"}]}',
        "{" + COMMIT + ', "siblings": [{"rfilename": "adapter_config.json", "size": 1e400, "blobId": "b"}]}',
        "{" + COMMIT + ', "siblings": [{"rfilename": "adapter_config.json", "size": 1, "lfs": "x"}]}',
        "{" + COMMIT + ', "siblings": [{"rfilename": "adapter_config.json", "size": 1}]}',
    ],
)
async def test_a_list_of_files_that_is_none_is_reported_as_the_hubs_mistake(
    tmp_path: Path, hub: FakeHub, listed: str
) -> None:
    hub.listed = listed.encode("latin-1")
    with pytest.raises(StoreUnavailable, match="list of files that cannot be read"):
        await read(roots(tmp_path, hub), "models/poet")


async def test_names_in_a_list_lead_nowhere(tmp_path: Path, hub: FakeHub) -> None:
    names = ["../adapter_config.json", "/adapter_config.json", "a/../adapter_config.json", "..", "", "\0"]
    siblings = [{"rfilename": name, "size": 1, "blobId": "b"} for name in names]
    hub.listed = json.dumps({"sha": "a" * 40, "siblings": siblings}).encode()
    with pytest.raises(InvalidRequest, match=f"no {CONFIG_FILE}"):
        await read(roots(tmp_path, hub), "models/poet")
    assert len(hub.requests) == 1 and kept(tmp_path) == []


@pytest.mark.parametrize("fault", ["reset", "chunk"])
async def test_a_list_that_breaks_off_is_the_hubs_failure_not_the_disks(
    tmp_path: Path, hub: FakeHub, fault: str
) -> None:
    hub.list_fault = fault
    with pytest.raises(StoreUnavailable, match="the connection broke"):
        await read(roots(tmp_path, hub), "models/poet")


async def test_a_list_that_comes_slowly_has_a_time_limit(hub: FakeHub) -> None:
    hub.list_fault = "drip"
    slow = Hub(hub.url, clock=itertools.count(0.0, 200.0).__next__)
    with pytest.raises(TryLater, match="more than 120 s"):
        slow.find(remote_root("models", "hf://acme"), "models/poet")


async def test_a_redirect_to_no_url_is_reported(tmp_path: Path, hub: FakeHub) -> None:
    hub.redirect_to = "http://["
    with pytest.raises(StoreUnavailable, match="redirects to a place that is not a URL"):
        await read(roots(tmp_path, hub), "models/poet")


async def test_a_cancelled_download_ends_and_keeps_what_came(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults = [200, "hang"]
    remote = roots(tmp_path, hub)
    reading = asyncio.create_task(read(remote, "models/poet"))
    await asyncio.to_thread(hub.sent.wait, 30)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    hub.released.set()
    num_requests = len(hub.requests)
    assert (await read(roots(tmp_path, hub), "models/poet"))[0][WEIGHTS_FILE] == FILES[WEIGHTS_FILE]
    assert len(hub.requests) <= num_requests + 5


@pytest.mark.parametrize("target", ["http://169.254.169.254", "http://localhost:1", "https://127.0.0.1", "file://"])
async def test_redirects_lead_only_to_the_operators_hosts(tmp_path: Path, hub: FakeHub, target: str) -> None:
    hub.redirect_to = target
    with pytest.raises(PathNotAllowed, match="--hub-host"):
        await read(roots(tmp_path, hub), "models/poet")
    assert {host for host, *_ in hub.requests} == {hub.url}


async def test_a_repository_that_moved_is_not_followed_out_of_the_root(tmp_path: Path, hub: FakeHub) -> None:
    hub.moved_to = "other/poet"
    with pytest.raises(InvalidRequest, match="has moved"):
        await read(roots(tmp_path, hub), "models/poet")


async def test_errors_name_the_source_and_no_secret(tmp_path: Path, hub: FakeHub) -> None:
    hub.push("acme/readme", {"README.md": b""})
    for source, words in (("models/none", "no such repository"), ("models/readme@main", f"no {CONFIG_FILE}")):
        with pytest.raises(InvalidRequest) as caught:
            await read(roots(tmp_path, hub), source)
        text = str(caught.value.__dict__) + str(caught.value)
        assert words in text and source in text and "secret" not in text and hub.url not in text


async def test_a_large_adapter_is_refused_before_it_is_read(tmp_path: Path, hub: FakeHub) -> None:
    with pytest.raises(InvalidRequest, match="--max-adapter-bytes"):
        await read(roots(tmp_path, hub, max_bytes=1000), "models/poet")
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    "source",
    [
        "models/../other/x",
        "models/https://evil/x",
        "models//x",
        "models/x/",
        "models/x?y",
        "models/x%2e",
        "models/x\\y",
        "models/x#y",
        "models/x@a..b",
        "models/x@",
        "models/x@/main",
        "models",
        "models/.git",
        "models/" + "a" * 2000,
        "bucket",
        "bucket/a@v1",
        "bucket/a/../b",
    ],
)
def test_a_text_never_leaves_its_root(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(PathNotAllowed):
        roots(tmp_path, models="hf://acme", bucket="s3://b/c").find(source)


@pytest.mark.parametrize(
    "url", ["hf://", "ftp://x", "http://x", "s3://", "s3://u:p@b", "az://c?sig=secret", "hf://a/../b", "hf://a@main"]
)
def test_an_operators_url_is_checked(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        remote_root("x", url)
    assert "secret" not in str(caught.value)


def test_a_token_does_not_travel_in_plaintext() -> None:
    with pytest.raises(ValueError, match="HF_ENDPOINT"):
        open_hub((), {"HF_ENDPOINT": "http://hub.example", "HF_TOKEN": "t"})
    assert open_hub((), {"HF_ENDPOINT": "http://127.0.0.1:1/", "HF_TOKEN": "t"}).hosts == ()


def test_buckets_of_every_kind_are_opened_and_credentials_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreUrlError):
        roots(tmp_path, a="az://container/x")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    remote = roots(tmp_path, a="az://container/x", g="gs://bucket/x")
    assert remote.find("a/poet") is not None and remote.find("g/poet") is not None and remote.find("team/x") is None


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
async def test_a_bucket_is_read_in_parts_of_one_state(tmp_path: Path, scheme: str) -> None:
    weights = os.urandom(9 << 20)
    with cloud_urls(tmp_path) as urls:
        url = urls[scheme]
        bucket = open_bucket(url)
        for name, data in (FILES | {WEIGHTS_FILE: weights}).items():
            bucket.put_if_absent(f"voices/poet/{name}", data)
        remote = roots(tmp_path, b=url, max_bytes=1 << 24)
        files, source = await read(remote, "b/voices/poet")
        assert files == {CONFIG_FILE: FILES[CONFIG_FILE], WEIGHTS_FILE: weights} and source == "b/voices/poet"

        found = remote.find("b/voices/poet")
        assert found is not None
        adapter = found.find()  # type: ignore[attr-defined]
        replace(bucket, f"voices/poet/{CONFIG_FILE}", b"{}")
        with pytest.raises(Exception, match="was replaced"):
            adapter.check_unchanged()
        with pytest.raises(Exception, match="was replaced"):
            list(adapter.read(adapter.files[0], 0))
        with pytest.raises(InvalidRequest, match="has no"):
            await read(remote, "b/voices")


def test_partial_files_are_kept_for_a_bounded_time_and_size(tmp_path: Path) -> None:
    now_s = 1e9
    partial = PartialFiles(tmp_path / "d", max_kept_bytes=100, clock=lambda: now_s)
    for name in ("a", "b", "c"):
        now_s += 1
        place = partial.take(name)
        (place / "x").write_bytes(bytes(40))
        assert partial.take(name) != place, "of another download that runs"
        partial.give_back(place, is_kept=True)
    assert not any((partial.take("a")).iterdir()) and any((partial.take("c")).iterdir())
    now_s += KEPT_S + 1
    partial.sweep()
    assert any((tmp_path / "d").iterdir()), "in use"


def test_every_error_is_one_that_clients_know() -> None:
    assert issubclass(StoreUnavailable, MotetError) and issubclass(PathNotAllowed, MotetError)
