"""Lints protos/ with buf. Called by `make lint`.

buf finds imports only inside its workspace, so the protos and Google's common ones are put side by side in a
temporary folder first.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import google.longrunning

PROTOS = Path(__file__).resolve().parents[1] / "protos"

# Slow admin work answers with google.longrunning.Operation; every other RPC has its own response, which
# tests/test_protos.py checks by name.
CONFIG = """
version: v2
modules:
  - path: protos
  - path: common
lint:
  use: [STANDARD, COMMENTS]
  ignore: [common]
  ignore_only:
    RPC_RESPONSE_STANDARD_NAME: [protos/motet/v1/adapters.proto]
    RPC_REQUEST_RESPONSE_UNIQUE: [protos/motet/v1/adapters.proto]
"""


def main() -> int:
    common = Path(next(iter(google.longrunning.__path__))).parents[1]
    with tempfile.TemporaryDirectory() as tmp:
        workspace = Path(tmp)
        shutil.copytree(PROTOS / "motet", workspace / "protos" / "motet")
        for package in ("api", "longrunning", "rpc"):
            target = workspace / "common" / "google" / package
            target.mkdir(parents=True)
            for path in (common / "google" / package).glob("*.proto"):
                # The file that registers as operations.proto is shipped as operations_proto.proto.
                shutil.copy(path, target / path.name.replace("operations_proto", "operations"))
        (workspace / "buf.yaml").write_text(CONFIG, encoding="utf-8")
        return subprocess.run(["buf", "lint"], cwd=workspace, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
