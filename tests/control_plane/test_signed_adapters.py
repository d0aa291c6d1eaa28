"""Signed adapters through a whole control plane, the SDK and the command line."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import motet
import pytest
from motet.cli.main import main

from tests.control_plane.server_processes import STEP_S, checkpoint, control_plane, start
from tests.control_plane.signatures.making import BUNDLES, Maker, pem_of


def signed_directory(directory: Path, signature: bytes | None = None) -> Path:
    """The adapter of the bundles, as its author has it on disk."""
    shutil.copytree(BUNDLES / "adapter", directory)
    if signature is not None:
        (directory / "model.sig").write_bytes(signature)
    return directory


async def test_only_signed_adapters_are_registered_and_their_signer_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maker = Maker()
    listed = [
        {"name": "release", "pem": (BUNDLES / "p256.pub").read_text()},
        {"name": "night builds", "pem": pem_of(maker.key)},
    ]
    trusted = tmp_path / "signers.json"
    trusted.write_text(json.dumps({"*": listed}))
    by_tool = signed_directory(tmp_path / "by-tool", (BUNDLES / "p256.sig").read_bytes())
    signed_directory(tmp_path / "by-other", maker.sign())
    unsigned = signed_directory(tmp_path / "unsigned")
    stranger = signed_directory(tmp_path / "stranger", Maker().sign())
    changed = signed_directory(tmp_path / "changed", (BUNDLES / "p256.sig").read_bytes())
    (changed / "adapter_config.json").write_bytes((changed / "adapter_config.json").read_bytes() + b"\n")
    flags = ("--host-cache", "memory", "--trusted-signers", str(trusted), "--require-signature")
    roots = ("--adapter-root", f"team={tmp_path}")
    async with control_plane(tmp_path, *flags, *roots) as (_, address, _workers):

        def use() -> None:
            with motet.Client(address) as client:
                for directory, words in (
                    (unsigned, "has no model.sig, and this server registers signed adapters only"),
                    (stranger, "signed by a key that is not trusted here"),
                    (changed, "adapter_config.json is not the file that model.sig signs"),
                ):
                    with pytest.raises(motet.FailedPrecondition, match=words) as caught:
                        client.adapters.register("poet", directory)
                    assert caught.value.reason == "SIGNATURE_INVALID"
                    with pytest.raises(motet.FailedPrecondition, match=words):
                        client.adapters.register_from_root("poet", f"team/{directory.name}")
                assert list(client.adapters.list()) == []
                adapter = client.adapters.register("poet", by_tool)
                assert adapter.active_version is not None and adapter.active_version.signature is not None
                assert adapter.active_version.signature.signer == "release"
                again = client.adapters.register_from_root("poet", "team/by-other")
                assert again.registration is not None
                assert again.registration.change is motet.RegistrationChange.VERSION_SIGNED
                assert again.active_version is not None and again.active_version.signature is not None
                assert again.active_version.digest == adapter.active_version.digest
                assert again.active_version.signature.method is motet.SignatureMethod.KEY
            assert main(["adapters", "get", "poet", "--server", address]) == 0

        await asyncio.to_thread(use)
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("signed by:")]
    assert line.split(maxsplit=2)[2].startswith("night builds, key ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "it is not valid JSON"),
        (json.dumps({"*": [{"name": "x", "pem": "y"}]}), "pem is neither a public key nor a certificate"),
    ],
)
async def test_signers_that_cannot_be_read_end_the_start(tmp_path: Path, content: str, words: str) -> None:
    trusted, model = tmp_path / "signers.json", checkpoint(tmp_path / "model")
    trusted.write_text(content)
    flags = ("--model", str(model), "--data-dir", str(tmp_path / "data"), "--host-cache", "memory")
    process = await start("control_plane", *flags, "--trusted-signers", str(trusted), cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), STEP_S)
    last = err.decode().splitlines()[-1]
    assert process.returncode == 2 and not out
    assert last.startswith(f"motet control-plane: --trusted-signers: {trusted}: ") and words in last
