"""The SDK sends a call again after a lost response; the API responds from memory, and changes nothing twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from motet import AsyncClient, Client
from motet.adapters.files import CHUNK_BYTES
from motet.uploads import AdapterUpload

from control_plane.api.text.codec import TextCodec
from tests.control_plane.api.fake_adapters import DIGEST, OTHER_DIGEST
from tests.control_plane.api.fakes import Api
from tests.fakes.tcp_proxy import TcpProxy


async def test_upload_sent_twice_is_registered_once(tmp_path: Path) -> None:
    source = tmp_path / "adapter"
    source.mkdir()
    (source / "adapter_config.json").write_text("{}")
    (source / "adapter_model.safetensors").write_bytes(bytes(CHUNK_BYTES * 6))
    codec = TextCodec(None, None)
    async with Api(tmp_path, codec).running() as api:

        def send_twice() -> None:
            upload = AdapterUpload("poet", source)
            with Client(api.address) as client:
                first = client.upload(upload, timeout_s=60.0)
                # The second is answered behind its header, while its chunks are still being written.
                assert client.upload(upload, timeout_s=60.0) == first

        await asyncio.to_thread(send_twice)
        assert [call for call in api.calls if call[0] == "register"] == [("register", "poet", False)]
    await codec.close()


@pytest.mark.parametrize("is_version", [False, True])
async def test_a_deletion_whose_reply_was_lost_is_repeated_and_ends_in_order(tmp_path: Path, is_version: bool) -> None:
    codec = TextCodec(None, None)
    async with Api(tmp_path, codec).running() as api, TcpProxy(api.port) as proxy:
        api.registry.add("poet", DIGEST, OTHER_DIGEST)
        gate = api.registry.delete_gate = asyncio.Event()
        async with AsyncClient(f"127.0.0.1:{proxy.port}") as client:
            names = client.adapters
            delete = names.delete_version("poet", OTHER_DIGEST) if is_version else names.delete("poet")
            deletion = asyncio.ensure_future(delete)
            await asyncio.wait_for(api.registry.delete_begun.wait(), 30)
            proxy.freeze()
            gate.set()
            await asyncio.wait_for(api.registry.delete_finished.wait(), 30)
            api.registry.add("poet", DIGEST, OTHER_DIGEST)  # anew, by somebody else
            proxy.cut()
            proxy.thaw()
            await deletion
        assert [call[0] for call in api.calls if str(call[0]).startswith("begin")] == [
            "begin_delete_version" if is_version else "begin_delete"
        ]
        assert [version.digest for version in api.registry.records["poet"].versions] == [DIGEST, OTHER_DIGEST]
    await codec.close()
