"""Adapters that a served system reads itself, from a bucket and from a Hub, registered by the SDK and by the CLI.

The bucket is moto's S3, the Hub a fake one on this machine; the tokens are those of transformers and PEFT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import boto3  # type: ignore[import-untyped]  # ships no annotations
import pytest
from motet import Adapter, AsyncClient, Client, InvalidArgument, PermissionDenied
from motet.cli import exits
from motet.cli.main import main

from tests.control_plane.adapters.sources.fake_hub import FakeHub
from tests.control_plane.registry.store.buckets import s3_server
from tests.e2e.harness import System, active_version
from tests.e2e.traffic import prompts
from tests.makers import make_adapter, make_checkpoint
from tests.oracle import Oracle

Progress = list[tuple[int, int]]

pytestmark = pytest.mark.slow
PROMPT = list(prompts([9], vocab_size=256, seed=3)[0])
NUM_TOKENS = 8
NAMES = ("in-bucket", "on-hub", "local")
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "64", "--max-rows", "8"]
WORKER_FLAGS += ["--max-model-len", "64", "--num-slots", "4", "--arena-bytes", "64MiB"]


@dataclass(frozen=True)
class Served:
    """A running system with three roots: a bucket, an organisation on a Hub, and a directory."""

    system: System
    client: Client
    oracle: Oracle
    hub: FakeHub
    commit: str  # of the Hub's repository
    sizes: dict[str, int]  # bytes of each adapter

    def tokens(self, adapter: str) -> list[int]:
        stream = self.client.generate(PROMPT, adapter=adapter, max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=120.0)
        return list(stream.result().completions[0].token_ids)

    def expected(self, name: str) -> list[int]:
        return list(self.oracle.greedy(PROMPT, NUM_TOKENS, name).token_ids)

    def motet(self, *argv: str) -> int:
        return main(["--server", self.system.address, *argv])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("sources")
    checkpoint = make_checkpoint(directory / "model", arch="llama")
    made = {
        name: make_adapter(directory / "roots" / name, checkpoint, rank=4, targets=["q_proj", "down_proj"], seed=seed)
        for seed, name in enumerate(NAMES)
    }
    files = {name: {path.name: path.read_bytes() for path in made[name].iterdir()} for name in NAMES}
    with s3_server() as bucket_url, FakeHub().running() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        client, (bucket, _, prefix) = boto3.client("s3"), bucket_url.removeprefix("s3://").partition("/")
        for name, data in files["in-bucket"].items():
            client.put_object(Bucket=bucket, Key=f"{prefix}/voices/in-bucket/{name}", Body=data)
        client.close()
        commit = hub.push("acme/on-hub", files["on-hub"], "v1")
        roots = {"bucket": bucket_url, "hub": "hf://acme", "team": str(directory / "roots")}
        flags = [flag for name, place in roots.items() for flag in ("--adapter-root", f"{name}={place}")]
        flags += ["--hub-host", hub.cdn.removeprefix("http://")]
        with System(checkpoint, directory, control_flags=flags) as system:
            system.start_worker(flags=WORKER_FLAGS)
            sizes = {
                name: sum(len(data) for file, data in files[name].items() if file.startswith("adapter_"))
                for name in NAMES
            }
            yield Served(system, system.client(), Oracle(checkpoint, made), hub, commit, sizes)


def test_an_adapter_of_a_bucket_is_registered_by_the_sdk_and_by_the_cli(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    progress: Progress = []
    adapter = served.client.adapters.register_from_root(
        "by-sdk", "bucket/voices/in-bucket", progress=lambda done, total: progress.append((done, total))
    )
    assert active_version(adapter).source == "bucket/voices/in-bucket"
    total = served.sizes["in-bucket"]
    assert progress == sorted(progress) and progress[-1] == (total, total)
    assert served.motet("adapters", "add", "by-cli", "--from", "bucket/voices/in-bucket", "--label", "a=b") == exits.OK
    printed = capsys.readouterr()
    assert printed.out.startswith("registered by-cli: version 1 (")
    lines = [line for line in printed.err.splitlines() if line.startswith("downloading ")]
    assert 1 <= len(lines) <= 10  # the bucket's server, in this process, may log beside them
    assert served.client.adapters.get("by-cli").labels == {"a": "b"}
    for name in ("by-sdk", "by-cli"):
        assert served.tokens(name) == served.expected("in-bucket") != served.expected("on-hub")


def test_an_adapter_of_a_hub_goes_on_after_a_break_and_shows_its_bytes(served: Served) -> None:
    """The Hub stops in the middle of the second file until the client has seen the bytes of the first, then breaks."""
    served.hub.faults = [200, "hang"]
    progress: Progress = []

    def show(done: int, total: int) -> None:
        progress.append((done, total))
        served.hub.released.set()

    async def register() -> Adapter:
        async with AsyncClient(served.system.address) as client:
            return await client.adapters.register_from_root("poet", "hub/on-hub@v1", progress=show, timeout_s=120.0)

    adapter = asyncio.run(register())
    total = served.sizes["on-hub"]
    assert progress[0][0] < total and progress[-1] == (total, total) and {each[1] for each in progress} == {total}
    assert served.hub.faults == [] and active_version(adapter).source == f"hub/on-hub@{served.commit}"
    assert served.tokens("poet") == served.expected("on-hub")
    assert served.motet("adapters", "add", "poet-too", "--from", f"hub/on-hub@{served.commit}") == exits.OK
    assert served.tokens("poet-too") == served.expected("on-hub")


def test_a_directory_is_registered_without_progress(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.motet("adapters", "add", "local", "--from", "team/local") == exits.OK
    assert capsys.readouterr().err == ""
    assert served.tokens("local") == served.expected("local")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("other/poet", "'other' is not one of the server's adapter roots"),
        ("hf://acme/on-hub", "'hf:' is not one of the server's adapter roots"),
        ("s3://bucket/voices", "'s3:' is not one of the server's adapter roots"),
        ("hub/../other/poet", "not a plain relative path below its root"),
        ("hub/on-hub@a..b", "'a..b' is not a revision"),
        ("bucket/voices/in-bucket@v1", "a path in a bucket has no @revision"),
        ("team/../model", "not a plain relative path below its root"),
        ("bucket", "names no directory; give bucket/PATH"),
    ],
)
def test_what_the_operator_did_not_list_is_refused_by_name(
    served: Served, capsys: pytest.CaptureFixture[str], source: str, words: str
) -> None:
    with pytest.raises(PermissionDenied) as caught:
        served.client.adapters.register_from_root("refused", source)
    assert caught.value.reason == "PATH_NOT_ALLOWED" and words in caught.value.message
    assert repr(source) in caught.value.message
    num_requests = len(served.hub.requests)
    assert served.motet("adapters", "add", "refused", "--from", source) == exits.REFUSED
    assert words in capsys.readouterr().err
    assert len(served.hub.requests) == num_requests


@pytest.mark.parametrize("source", ["bucket/voices/none", "hub/none", "hub/on-hub@none"])
def test_what_is_not_there_is_refused_by_name(served: Served, source: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        served.client.adapters.register_from_root("refused", source)
    assert repr(source) in str(caught.value)
