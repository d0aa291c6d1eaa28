"""The SDK sends an upload again after a lost response; the API responds from memory, without a second registration."""

from __future__ import annotations

import asyncio
from pathlib import Path

from motet import Client
from motet.adapters.files import CHUNK_BYTES
from motet.uploads import AdapterUpload

from control_plane.api.text.codec import TextCodec
from tests.control_plane.api.fakes import Api


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
