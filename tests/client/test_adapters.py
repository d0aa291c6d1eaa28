"""The registry calls: uploads, pages, operations, changes, with both clients."""

from __future__ import annotations

import asyncio
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from google.rpc import status_pb2
from motet import (
    AdapterState,
    AdapterTier,
    AdapterVisibility,
    AsyncClient,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    RegistrationChange,
    Unavailable,
)
from motet.adapters.files import CHUNK_BYTES
from motet.v1 import adapters_pb2

from tests.client.conftest import Driver
from tests.client.scripted_server import DIGEST, ScriptedServer, abort, make_adapter


def failing(server: ScriptedServer, times: int) -> Any:
    """An error that is made so many times: the connection breaks."""
    left = iter(range(times))

    def fail(context: grpc.ServicerContext) -> None:
        if next(left, None) is not None:
            abort(context, grpc.StatusCode.UNAVAILABLE, "Socket closed")

    return fail


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    """A directory with the files of an adapter; the scripted server does not read what is in them."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(random.Random(1).randbytes(CHUNK_BYTES * 2 + 17))
    return tmp_path


def test_register_uploads_both_files_whole_and_in_bounded_chunks(
    server: ScriptedServer, driver: Driver, adapter_dir: Path
) -> None:
    progress: list[tuple[int, int]] = []
    adapter = driver.run(
        lambda client: client.adapters.register(
            "pirate",
            adapter_dir,
            display_name="Pirate",
            labels={"team": "sea"},
            progress=lambda sent, total: progress.append((sent, total)),
        )
    )
    assert server.files == {path.name: path.read_bytes() for path in adapter_dir.iterdir()}
    assert len(server.chunk_sizes) == 4 and max(server.chunk_sizes) <= 1024 * 1024
    assert (adapter.id, adapter.display_name, dict(adapter.labels)) == ("pirate", "Pirate", {"team": "sea"})
    assert adapter.state is AdapterState.ACTIVE and adapter.active_version.digest == DIGEST
    total = sum(path.stat().st_size for path in adapter_dir.iterdir())
    assert progress[-1] == (total, total) and progress == sorted(progress)


def test_registration_says_the_change_and_the_version_before(
    server: ScriptedServer, driver: Driver, adapter_dir: Path
) -> None:
    server.registration = adapters_pb2.Registration(
        change=adapters_pb2.REGISTRATION_CHANGE_VERSION_ADDED,
        previous_version=adapters_pb2.AdapterVersion(digest="cd" * 32, number=1),
    )
    adapter = driver.run(lambda client: client.adapters.register("pirate", adapter_dir))
    assert adapter.active_version.number == 2
    assert adapter.registration.change is RegistrationChange.VERSION_ADDED
    assert (adapter.registration.previous_version.digest, adapter.registration.previous_version.number) == (
        "cd" * 32,
        1,
    )
    server.adapters["pirate"].ClearField("registration")
    assert driver.run(lambda client: client.adapters.get("pirate")).registration is None


def test_upload_that_breaks_is_sent_again_whole_under_its_request_id(
    server: ScriptedServer, driver: Driver, adapter_dir: Path
) -> None:
    server.upload_error = failing(server, 2)
    progress: list[int] = []
    adapter = driver.run(
        lambda client: client.adapters.register(
            "pirate", adapter_dir, progress=lambda sent, total: progress.append(sent)
        )
    )
    assert adapter.id == "pirate" and len(server.requests) == 3
    assert server.files == {path.name: path.read_bytes() for path in adapter_dir.iterdir()}
    (request_id,) = {header.request_id for header in server.requests}
    assert len(request_id) == 32
    assert progress[-1] == max(progress)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.adapters.register_from_root("pirate", "shared/pirate"),
        lambda client: client.adapters.get("pirate"),
        lambda client: client.adapters.pin("pirate"),
        lambda client: client.adapters.unpin("pirate"),
    ],
)
def test_call_that_may_be_made_twice_is_made_again(server: ScriptedServer, driver: Driver, call: Any) -> None:
    server.adapters["pirate"] = make_adapter("pirate")
    server.unary_error = failing(server, 2)
    assert driver.run(call).id == "pirate"
    assert len(server.requests) == 3 and all(request == server.requests[0] for request in server.requests)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.adapters.delete("pirate", wait=False),
        lambda client: client.adapters.delete_version("pirate", DIGEST, wait=False),
    ],
)
def test_repeated_deletion_has_the_request_id_of_the_first(server: ScriptedServer, driver: Driver, call: Any) -> None:
    server.adapters["pirate"] = make_adapter("pirate")
    server.unary_error = failing(server, 2)
    driver.run(call)
    (request_id,) = {request.request_id for request in server.requests}
    assert len(server.requests) == 3 and len(request_id) == 32


def test_call_that_must_not_be_made_twice_is_not(server: ScriptedServer, driver: Driver) -> None:
    server.adapters["pirate"] = make_adapter("pirate")
    server.unary_error = failing(server, 1)
    with pytest.raises(Unavailable, match="the connection broke to the server at"):
        driver.run(lambda client: client.adapters.activate("pirate", DIGEST))
    assert len(server.requests) == 1 and driver.sleeps == []


def test_validate_only_stores_nothing(server: ScriptedServer, driver: Driver, adapter_dir: Path) -> None:
    driver.run(lambda client: client.adapters.register("pirate", adapter_dir, validate_only=True))
    assert server.adapters == {} and server.requests[0].validate_only


def test_refusal_in_the_middle_of_an_upload_is_returned(
    server: ScriptedServer, driver: Driver, adapter_dir: Path
) -> None:
    server.upload_error = lambda context: abort(context, grpc.StatusCode.FAILED_PRECONDITION, "other base model")
    with pytest.raises(FailedPrecondition, match="other base model"):
        driver.run(lambda client: client.adapters.register("pirate", adapter_dir))


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [
        ("adapter_config.json", "has no adapter_config.json"),
        ("adapter_model.safetensors", "has no adapter_model.safetensors"),
    ],
)
def test_missing_file_is_returned_before_any_call(
    server: ScriptedServer, driver: Driver, adapter_dir: Path, missing: str, complaint: str
) -> None:
    (adapter_dir / missing).unlink()
    with pytest.raises(InvalidArgument, match=complaint):
        driver.run(lambda client: client.adapters.register("pirate", adapter_dir))
    assert server.requests == []


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "chat_template.jinja", "model.sig"])
def test_a_link_to_nothing_is_refused_and_not_left_out(
    server: ScriptedServer, driver: Driver, adapter_dir: Path, name: str
) -> None:
    (adapter_dir / name).unlink(missing_ok=True)
    (adapter_dir / name).symlink_to(adapter_dir / "blobs" / "4d7a")
    with pytest.raises(InvalidArgument, match=f"{name} is a link to a file that is not there; put the file"):
        driver.run(lambda client: client.adapters.register("pirate", adapter_dir))
    (adapter_dir / name).unlink()
    (adapter_dir / name).mkdir()
    with pytest.raises(InvalidArgument, match=f"{name} is not a file"):
        driver.run(lambda client: client.adapters.register("pirate", adapter_dir))
    assert server.requests == []


def test_pickled_weights_are_refused_with_the_way_out(
    server: ScriptedServer, driver: Driver, adapter_dir: Path
) -> None:
    (adapter_dir / "adapter_model.safetensors").rename(adapter_dir / "adapter_model.bin")
    with pytest.raises(InvalidArgument, match=r"pickle.*refused.*safe_serialization=True"):
        driver.run(lambda client: client.adapters.register("pirate", adapter_dir))
    assert server.requests == []


def test_what_lies_there_instead_is_named_with_the_way_on(
    server: ScriptedServer, driver: Driver, adapter_dir: Path
) -> None:
    weights = adapter_dir / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()

    def refusal() -> str:
        with pytest.raises(InvalidArgument) as caught:
            driver.run(lambda client: client.adapters.register("pirate", adapter_dir))
        return str(caught.value)

    for number in (1, 2):
        (adapter_dir / f"adapter_model-0000{number}-of-00002.safetensors").write_bytes(content)
    assert "has no adapter_model.safetensors; its weights are in 2 shards" in refusal()
    for path in adapter_dir.glob("adapter_model*"):
        path.unlink()
    for name, words in (("adapter_model.tensors", "tensorizer"), ("adapters.safetensors", "mlx-lm")):
        (adapter_dir / name).write_bytes(content)
        assert f"has no adapter_model.safetensors; there is {name} of " in refusal() and words in refusal()
        (adapter_dir / name).unlink()
    for path in adapter_dir.glob("adapter*"):
        path.unlink()
    for step in (500, 1000):
        (adapter_dir / f"checkpoint-{step}").mkdir()
        (adapter_dir / f"checkpoint-{step}" / "adapter_config.json").write_text("{}")
    assert "there are adapters in checkpoint-1000, checkpoint-500: give one of these" in refusal()
    (adapter_dir / "adapter_config.json").write_text("{}")
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 7\n")
    assert "adapter_model.safetensors is a git-lfs pointer, not the file itself; run `git lfs pull`" in refusal()
    assert server.requests == []


def test_file_that_shrinks_during_the_upload_is_returned(driver: Driver, adapter_dir: Path) -> None:
    weights = adapter_dir / "adapter_model.safetensors"

    def shrink(sent: int, total: int) -> None:
        weights.write_bytes(b"short")

    with pytest.raises(InvalidArgument, match="changed during the upload"):
        driver.run(lambda client: client.adapters.register("pirate", adapter_dir, progress=shrink))


def test_list_walks_all_pages(server: ScriptedServer, driver: Driver) -> None:
    for number in range(5):
        server.adapters[f"a{number}"] = make_adapter(f"a{number}")
    assert [adapter.id for adapter in driver.list(page_size=2)] == ["a0", "a1", "a2", "a3", "a4"]
    assert [request.page_token for request in server.requests] == ["", "2", "4"]


def test_versions_walk_all_pages(server: ScriptedServer, driver: Driver) -> None:
    async def in_loop(client: Any) -> list[str]:
        return [version.digest async for version in client.adapters.versions("a", page_size=2)]

    def blocking(client: Any) -> list[str]:
        return [version.digest for version in client.adapters.versions("a", page_size=2)]

    digests = driver.run(in_loop if driver.is_async else blocking)
    assert digests == [f"{number:064x}" for number in (3, 2, 1)]


def test_get_pin_unpin_activate_and_update(server: ScriptedServer, driver: Driver) -> None:
    server.adapters["pirate"] = make_adapter("pirate", labels={"old": "1"})
    adapter = driver.run(lambda client: client.adapters.get("adapters/pirate"))
    assert adapter.placements[0].tier is AdapterTier.ARENA and adapter.placements[0].worker_id == "w0"
    assert adapter.active_version.target_modules == ("m.q_proj",)
    assert driver.run(lambda client: client.adapters.pin("pirate")).pinned
    assert not driver.run(lambda client: client.adapters.unpin("pirate")).pinned
    activated = driver.run(lambda client: client.adapters.activate("pirate", "ef" * 32, etag="e1"))
    assert activated.active_version.digest == "ef" * 32 and server.requests[-1].etag == "e1"
    updated = driver.run(lambda client: client.adapters.update("pirate", labels={"new": "2"}))
    assert dict(updated.labels) == {"new": "2"} and list(server.requests[-1].update_mask.paths) == ["labels"]


def test_update_of_nothing_is_refused(driver: Driver) -> None:
    with pytest.raises(InvalidArgument, match="nothing to change"):
        driver.run(lambda client: client.adapters.update("pirate"))


def test_delete_waits_for_its_operation(server: ScriptedServer, driver: Driver) -> None:
    server.adapters["pirate"] = make_adapter("pirate")
    server.num_polls_until_done = 3
    driver.run(lambda client: client.adapters.delete("pirate"))
    assert [request.name for request in server.requests[1:]] == ["operations/1"] * 3
    assert driver.sleeps == sorted(driver.sleeps) and len(driver.sleeps) == 3
    with pytest.raises(NotFound):
        driver.run(lambda client: client.adapters.get("pirate"))


@pytest.mark.parametrize("wait", [True, False])
def test_a_version_is_deleted_and_its_adapter_stays(server: ScriptedServer, driver: Driver, wait: bool) -> None:
    server.adapters["pirate"] = make_adapter("pirate")
    server.num_polls_until_done = 2
    driver.run(lambda client: client.adapters.delete_version("adapters/pirate", "ef" * 32, etag="e1", wait=wait))
    request = server.requests[0]
    assert (request.name, request.digest, request.etag) == ("adapters/pirate", "ef" * 32, "e1")
    assert [request.name for request in server.requests[1:]] == ["operations/1"] * (2 if wait else 0)
    assert driver.run(lambda client: client.adapters.get("pirate")).id == "pirate"


def test_delete_without_waiting_sends_one_request(server: ScriptedServer, driver: Driver) -> None:
    server.adapters["pirate"] = make_adapter("pirate")
    driver.run(lambda client: client.adapters.delete("pirate", wait=False))
    assert len(server.requests) == 1 and driver.sleeps == []


def test_operation_that_failed_raises_its_error(server: ScriptedServer, driver: Driver) -> None:
    server.adapters["pirate"] = make_adapter("pirate")
    server.operation_error = status_pb2.Status(code=grpc.StatusCode.FAILED_PRECONDITION.value[0], message="still held")
    with pytest.raises(FailedPrecondition, match="still held"):
        driver.run(lambda client: client.adapters.delete("pirate"))


def test_operation_that_never_ends_meets_the_timeout(server: ScriptedServer, driver: Driver) -> None:
    server.adapters["pirate"] = make_adapter("pirate")
    server.num_polls_until_done = 10**9
    with pytest.raises(DeadlineExceeded, match="operations/1 has not ended within timeout_s=5"):
        driver.run(lambda client: client.adapters.delete("pirate", timeout_s=5.0))
    assert 5.0 <= sum(driver.sleeps) <= 6.0


def test_register_from_root_reads_the_adapter_of_the_operation(server: ScriptedServer, driver: Driver) -> None:
    adapter = driver.run(lambda client: client.adapters.register_from_root("pirate", "shared/pirate"))
    assert adapter.id == "pirate" and server.requests[0].source == "shared/pirate"
    driver.run(lambda client: client.adapters.register_from_root("pirate", "shared/pirate"))
    request_ids = {request.request_id for request in server.requests}
    assert len(request_ids) == 2 and all(len(request_id) == 32 for request_id in request_ids)


def test_register_from_root_shows_how_much_was_downloaded(server: ScriptedServer, driver: Driver) -> None:
    server.downloads.extend([(0, 0), (0, 900), (300, 900), (300, 900), (900, 900), (900, 900)])
    progress: list[tuple[int, int]] = []
    adapter = driver.run(
        lambda client: client.adapters.register_from_root(
            "pirate", "hub/pirate", progress=lambda done, total: progress.append((done, total))
        )
    )
    assert adapter.id == "pirate"
    assert progress == [(0, 900), (300, 900), (900, 900)], "each state once, and none before the size is known"


def test_a_progress_callback_that_fails_ends_the_wait(server: ScriptedServer, driver: Driver) -> None:
    server.downloads.extend([(1, 2)] * 9)

    def fail(_done: int, _total: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        driver.run(lambda client: client.adapters.register_from_root("pirate", "hub/pirate", progress=fail))


def test_status_is_read(server: ScriptedServer, driver: Driver) -> None:
    server.status.model.name = "tiny"
    server.status.workers.add(worker_id="w0", num_blocks=64)
    status = driver.run(lambda client: client.status())
    assert status.model.name == "tiny" and status.workers[0].num_blocks == 64


async def test_async_upload_that_is_cancelled_ends_at_the_server(server: ScriptedServer, adapter_dir: Path) -> None:
    begun = threading.Event()

    def wait(context: grpc.ServicerContext) -> NoReturn:
        context.add_callback(server.cancelled.set)
        begun.set()
        assert server.cancelled.wait(30), "the client never cancelled"
        abort(context, grpc.StatusCode.CANCELLED, "gone")

    server.upload_error = wait
    async with AsyncClient(server.target) as client:
        task = asyncio.create_task(client.adapters.register("pirate", adapter_dir))
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.cancelled.wait, 30)


def register(directory: Path, ownership: dict[str, Any], client: Any) -> Any:
    return client.adapters.register("pirate", directory, **ownership)


def test_owner_and_visibility_are_sent_and_read(server: ScriptedServer, driver: Driver, adapter_dir: Path) -> None:
    """An enumeration member and its text mean the same; what is left out is not sent."""
    for given in (AdapterVisibility.SHARED, "shared"):
        ownership = {"visibility": given, "shared_with": ["labs", "ops"], "owner": "acme"}
        driver.run(partial(register, adapter_dir, ownership))
        header = server.requests[-1]
        sent = (header.visibility, list(header.shared_with), header.owner)
        assert sent == (adapters_pb2.ADAPTER_VISIBILITY_SHARED, ["labs", "ops"], "acme")
    driver.run(lambda client: client.adapters.register("pirate", adapter_dir))
    header = server.requests[-1]
    assert (header.visibility, list(header.shared_with), header.owner) == (0, [], "")
    server.adapters["pirate"] = make_adapter(
        "pirate", owner="acme", visibility=adapters_pb2.ADAPTER_VISIBILITY_SHARED, shared_with=["labs"]
    )
    adapter = driver.run(lambda client: client.adapters.get("pirate"))
    assert (adapter.owner, adapter.visibility, adapter.shared_with) == ("acme", AdapterVisibility.SHARED, ("labs",))
    driver.run(lambda client: client.adapters.update("pirate", visibility="public", shared_with=[], owner=""))
    assert list(server.requests[-1].update_mask.paths) == ["visibility", "shared_with", "owner"]
    adapter = driver.run(lambda client: client.adapters.get("pirate"))
    assert (adapter.owner, adapter.visibility, adapter.shared_with) == ("", AdapterVisibility.PUBLIC, ())
    server.adapters["pirate"] = make_adapter("pirate", visibility=99)
    assert driver.run(lambda client: client.adapters.get("pirate")).visibility is AdapterVisibility.UNSPECIFIED


@pytest.mark.parametrize("given", ["secret", "", AdapterVisibility.UNSPECIFIED])
def test_unknown_visibilities_are_refused_before_anything_is_sent(
    server: ScriptedServer, driver: Driver, adapter_dir: Path, given: str
) -> None:
    with pytest.raises(InvalidArgument, match="use one of 'private', 'shared', 'public'"):
        driver.run(lambda client: client.adapters.register("pirate", adapter_dir, visibility=given))
    with pytest.raises(InvalidArgument, match="visibility: is"):
        driver.run(lambda client: client.adapters.update("pirate", visibility=given))
    assert not server.requests
