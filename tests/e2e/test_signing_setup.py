"""The commands of docs/security.md sign an adapter and have the server demand it, as they are printed."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.control_plane.signatures.making import BUNDLES
from tests.docs_commands import block, commands, run
from tests.e2e.documented_server import started

DOCUMENT = "docs/security.md"


async def test_signatures_are_set_up_with_the_commands_of_the_document(tmp_path: Path) -> None:
    """Four commands make the key, the file of signers and the signature, and the fifth starts the server."""
    setup, start = commands(block(DOCUMENT, "setup-signatures")), commands(block(DOCUMENT, "start-signatures"))
    assert len(setup) + len(start) - 1 == 5
    signed = tmp_path / "my-adapter"
    shutil.copytree(BUNDLES / "adapter", signed)
    run(block(DOCUMENT, "setup-signatures"), tmp_path)
    shutil.copytree(BUNDLES / "adapter", tmp_path / "unsigned")
    changed = tmp_path / "changed"
    shutil.copytree(signed, changed)
    (changed / "adapter_config.json").write_bytes((changed / "adapter_config.json").read_bytes() + b"\n")
    async with started(DOCUMENT, "start-signatures", tmp_path) as (add, motet):
        for name, words in (("unsigned", "has no model.sig"), ("changed", "is not the file that model.sig signs")):
            code, text = await motet(*(word.replace("my-adapter", name) for word in add))
            assert code != 0 and words in text
        code, text = await motet(*add)
        assert code == 0, text
        server = add[: add.index("adapters")]
        code, text = await motet(*server, "adapters", "get", "poet")
        (line,) = [line for line in text.splitlines() if line.startswith("signed by:")]
        assert line.split()[2] == "release,"
