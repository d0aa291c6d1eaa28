"""The SDK's uploads over connections that break."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from motet import AsyncClient, Client
from motet.adapters import files
from motet.v1 import adapters_pb2

from control_plane.api.admin import upload as server_upload
from tests.control_plane.api.admin.calls import adapters, refused
from tests.control_plane.api.fakes import Api
from tests.fakes.tcp_proxy import TcpProxy

KIB = 1024
SLACK = 256 * KIB  # what may be on its way when a connection is cut
DATA = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": random.Random(1).randbytes(3_500_000)}


class Cutter:
    """Cuts the connection whenever about so many bytes of the upload came to the server; counts what passes."""

    def __init__(self, api: Api, thresholds: list[int], *, restarts: bool = False) -> None:
        self._api = api
        self._thresholds = thresholds
        self._restarts = restarts
        self._begin = 0  # what was on the disk at the last cut, less what had passed
        self.num_passed = 0
        self.on_disk: list[int] = []  # at each cut
        self.proxy: Any = None

    def on_bytes(self, data: bytes) -> None:
        self.num_passed += len(data)
        if self._thresholds and self.num_passed + self._begin >= self._thresholds[0]:
            self.proxy.freeze()

    async def run(self) -> None:
        while self._thresholds:
            while self._num_bytes() < self._thresholds[0] - SLACK or self.proxy.is_open:
                await asyncio.sleep(0.005)
            self._thresholds.pop(0)
            self.proxy.cut()
            while self._api.uploads.spools.num_running:
                await asyncio.sleep(0.005)
            self.on_disk.append(self._num_bytes())
            self._begin = self.on_disk[-1] - self.num_passed
            if self._restarts:
                while self._api.uploads.spools.remove_oldest():  # a start leaves nothing either
                    pass
            self.proxy.thaw()

    def _num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._api.uploads_dir.rglob("adapter_*"))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "CHUNK_BYTES", 32 * KIB)
    monkeypatch.setattr(server_upload, "WRITE_BYTES", 1)
    made = tmp_path / "adapter"
    made.mkdir()
    for name, data in DATA.items():
        (made / name).write_bytes(data)
    return made


async def register(kind: str, port: int, directory: Path, progress: Any) -> None:
    target = f"127.0.0.1:{port}"
    if kind == "asyncio":
        async with AsyncClient(target) as client:
            await client.adapters.register("poet", directory, progress=progress, timeout_s=120.0)
        return

    def run() -> None:
        with Client(target) as client:
            client.adapters.register("poet", directory, progress=progress, timeout_s=120.0)

    await asyncio.to_thread(run)


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_upload_goes_on_where_the_connection_broke(api: Api, directory: Path, kind: str) -> None:
    generator = random.Random(7)
    thresholds = [begin + generator.randrange(400 * KIB) for begin in (600 * KIB, 1400 * KIB, 2200 * KIB)]
    cutter = Cutter(api, list(thresholds))
    sent: list[int] = []
    async with TcpProxy(api.port, on_bytes=cutter.on_bytes) as proxy:
        cutter.proxy = proxy
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            group.create_task(cutter.run())
            group.create_task(register(kind, proxy.port, directory, lambda done, _total: sent.append(done)))
    assert api.registry.files["poet"] == DATA
    total = sum(map(len, DATA.values()))
    assert cutter.num_passed < total + len(thresholds) * SLACK + 128 * KIB, "first bytes were sent again"
    assert cutter.on_disk == sorted(cutter.on_disk)
    assert len(cutter.on_disk) == len(thresholds)
    assert sent[-1] == total
    assert {have + files.CHUNK_BYTES for have in cutter.on_disk} <= set(sent), "progress goes on from there"
    assert not list(api.uploads_dir.iterdir())


async def test_upload_begins_again_where_the_server_was_started_again(api: Api, directory: Path) -> None:
    cutter = Cutter(api, [900 * KIB], restarts=True)
    async with TcpProxy(api.port, on_bytes=cutter.on_bytes) as proxy:
        cutter.proxy = proxy
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            group.create_task(cutter.run())
            group.create_task(register("blocking", proxy.port, directory, None))
    assert api.registry.files["poet"] == DATA
    assert cutter.num_passed > sum(map(len, DATA.values())) + 600 * KIB


@pytest.mark.parametrize("upload_id", ["", "x" * 129, "a\x07"])
async def test_ids_that_cannot_be(api: Api, upload_id: str) -> None:
    request = adapters_pb2.GetUploadRequest(upload_id=upload_id)
    code, _, fields = await refused(adapters(api).GetUpload(request))
    assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["upload_id"])


async def test_unknown_upload_is_not_found(api: Api) -> None:
    code, reason, _ = await refused(adapters(api).GetUpload(adapters_pb2.GetUploadRequest(upload_id="never")))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "UPLOAD_NOT_FOUND")
