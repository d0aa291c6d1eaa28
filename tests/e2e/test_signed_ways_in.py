"""A server that demands signatures demands them on every way in. No weights without a trusted one reach a worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from motet import AsyncClient, Client, FailedPrecondition, InvalidArgument, LoraTask
from motet.v1 import adapters_pb2_grpc

from tests.control_plane.adapters.sources.fake_hub import FakeHub
from tests.control_plane.signatures.making import Maker, pem_of
from tests.e2e.harness import System
from tests.hostile.isolation import matrix
from tests.makers import make_adapter, make_checkpoint

PROMPT = list(range(3, 12))
CONFIG, WEIGHTS, SIGNATURE = "adapter_config.json", "adapter_model.safetensors", "model.sig"
# What is wrong with the signature, and the server's words for it.
WRONG = {
    "none": "registers signed adapters only",
    "a stranger's": "signed by a key that is not trusted here",
    "of another config": f"{CONFIG} is not the file that model.sig signs",
    "of other weights": f"{WEIGHTS} is not the file that model.sig signs",
}


@dataclass(frozen=True)
class Served:
    """A system with one worker, three roots and one trusted signer."""

    system: System
    client: Client
    hub: FakeHub
    roots: Path
    good: dict[str, bytes]
    wrong: dict[str, dict[str, bytes]]
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    def files(self, which: str) -> dict[str, bytes]:
        return self.good if which == "good" else self.wrong[which]

    def directory(self, which: str) -> Path:
        directory = self.roots / str(next(self.numbers))
        directory.mkdir()
        for name, data in self.files(which).items():
            (directory / name).write_bytes(data)
        return directory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("signed")
    checkpoint = make_checkpoint(directory / "model", arch="llama")
    made = make_adapter(directory / "made", checkpoint, rank=4, targets=["q_proj"], seed=1)
    other = make_adapter(directory / "other", checkpoint, rank=4, targets=["q_proj"], seed=2)
    files = {name: (made / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    maker = Maker()
    signature = maker.sign(files)
    wrong = {
        "none": files,
        "a stranger's": {**files, SIGNATURE: Maker().sign(files)},
        "of another config": {**files, SIGNATURE: signature, CONFIG: files[CONFIG] + b"\n"},
        "of other weights": {**files, SIGNATURE: signature, WEIGHTS: (other / WEIGHTS).read_bytes()},
    }
    trusted, roots = directory / "signers.json", directory / "roots"
    trusted.write_text(json.dumps({"*": [{"name": "release", "pem": pem_of(maker.key)}]}))
    roots.mkdir()
    with FakeHub().running() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        flags = ["--adapter-root", "hub=hf://acme", "--adapter-root", f"team={roots}"]
        flags += ["--hub-host", hub.cdn.removeprefix("http://")]
        flags += ["--trusted-signers", str(trusted), "--require-signature"]
        with System(checkpoint, directory, control_flags=flags) as system:
            system.start_hash_worker()
            yield Served(system, system.client(), hub, roots, {**files, SIGNATURE: signature}, wrong)


Way = Callable[[Served, str], Any]


def upload(served: Served, which: str) -> Any:
    return served.client.adapters.register("uploaded", served.directory(which))


def resumed_upload(served: Served, which: str) -> Any:
    """The first file in one call, the others in another one."""
    stream: list[Any] = matrix.upload(served.files(which), "resumed", upload_id=f"broken-{next(served.numbers)}")
    with grpc.insecure_channel(served.system.address) as channel:
        stub: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="send it again"):
            stub.UploadAdapter(iter(stream[:2]), timeout=60)
        try:
            return stub.UploadAdapter(iter([stream[0], *stream[2:]]), timeout=60)
        except grpc.RpcError as error:
            raise FailedPrecondition(str(error)) from error


def from_directory(served: Served, which: str) -> Any:
    return served.client.adapters.register_from_root("listed", f"team/{served.directory(which).name}")


def from_hub(served: Served, which: str) -> Any:
    revision = f"v{next(served.numbers)}"
    served.hub.push("acme/on-hub", served.files(which), revision)
    return served.client.adapters.register_from_root("remote", f"hub/on-hub@{revision}")


def task(served: Served, which: str) -> Any:
    sent = LoraTask(next(served.numbers), served.files(which))
    return served.client.generate(PROMPT, lora_task=sent, max_tokens=2, timeout_s=60.0).result()


def push(served: Served, which: str) -> Any:
    files = served.files(which)
    return served.client.adapters.push("pushed", files[CONFIG], files[WEIGHTS], signature=files.get(SIGNATURE, b""))


def push_in_an_event_loop(served: Served, which: str) -> Any:
    async def call() -> Any:
        files = served.files(which)
        async with AsyncClient(served.system.address) as client:
            signature = files.get(SIGNATURE, b"")
            return await client.adapters.push("pushed", files[CONFIG], files[WEIGHTS], signature=signature)

    return asyncio.run(call())


WAYS = (upload, resumed_upload, from_directory, from_hub, task, push, push_in_an_event_loop)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_only_what_a_trusted_signer_signed_comes_in(served: Served, way: Way) -> None:
    before = {adapter.id for adapter in served.client.adapters.list()}
    for which, words in WRONG.items():
        with pytest.raises(FailedPrecondition, match=words):
            way(served, which)
    assert {adapter.id for adapter in served.client.adapters.list()} == before
    way(served, "good")
    for adapter in served.client.adapters.list():
        version = adapter.active_version
        assert version is not None and version.signature is not None and version.signature.signer == "release"


def test_what_is_only_checked_or_held_needs_a_signature_too(served: Served) -> None:
    files = served.wrong["none"]
    for is_held in (True, False):
        with pytest.raises(FailedPrecondition, match=WRONG["none"]):
            served.client.adapters.push("held", files[CONFIG], files[WEIGHTS], hold=is_held, validate_only=not is_held)
    with pytest.raises(FailedPrecondition, match=WRONG["none"]):
        served.client.adapters.register("held", served.directory("none"), validate_only=True)


def test_a_signature_of_bytes_that_the_client_would_make_itself_is_refused(served: Served) -> None:
    with pytest.raises(InvalidArgument, match="give config and tensors as the bytes that were signed"):
        served.client.adapters.push("x", json.loads(served.good[CONFIG]), served.good[WEIGHTS], signature=b"{}")
