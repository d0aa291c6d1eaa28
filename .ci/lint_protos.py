"""Lints protos/ with buf. Called by `make lint`.

protos/google is Google's and protos/keda has KEDA's names: neither is linted. That both are complete shows here, since
buf compiles everything below protos/.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parents[1] / "protos"

# Slow admin work answers with google.longrunning.Operation; every other RPC has its own response, which
# tests/test_protos.py checks by name.
CONFIG = """
version: v2
modules:
  - path: protos
lint:
  use: [STANDARD, COMMENTS]
  ignore: [protos/google, protos/keda]
  ignore_only:
    RPC_RESPONSE_STANDARD_NAME: [protos/motet/v1/adapters.proto, protos/motet/v1/verify.proto]
    RPC_REQUEST_RESPONSE_UNIQUE: [protos/motet/v1/adapters.proto, protos/motet/v1/verify.proto]
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as tmp:  # buf wants its settings beside the protos
        workspace = Path(tmp)
        shutil.copytree(PROTOS, workspace / "protos", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (workspace / "buf.yaml").write_text(CONFIG, encoding="utf-8")
        return subprocess.run(["buf", "lint"], cwd=workspace, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
