"""Writes the Python stubs of protos/motet/v1 into client/motet/v1, or checks that they are up to date.

Run by `make stubs` and `make check-stubs` with grpcio-tools 1.74.0: stubs of newer tools refuse to load on
protobuf 6. Usage: generate.py [--check].
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import google.longrunning
import grpc_tools.protoc

PROTOS = Path(__file__).resolve().parent
STUBS = PROTOS.parent / "client" / "motet" / "v1"


def generate(out: Path) -> None:
    """Compile every .proto below motet/v1 into `out`/motet/v1."""
    common = Path(next(iter(google.longrunning.__path__))).parents[1]
    with tempfile.TemporaryDirectory() as extra:
        # googleapis-common-protos ships operations.proto under another file name than the one it registers.
        longrunning = Path(extra) / "google" / "longrunning"
        longrunning.mkdir(parents=True)
        shutil.copy(common / "google/longrunning/operations_proto.proto", longrunning / "operations.proto")
        well_known = Path(grpc_tools.protoc.__file__).parent / "_proto"
        code = grpc_tools.protoc.main(
            ["protoc", f"-I{PROTOS}", f"-I{extra}", f"-I{common}", f"-I{well_known}"]
            + [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
            + [str(path) for path in sorted((PROTOS / "motet/v1").glob("*.proto"))]
        )
    if code != 0:
        raise SystemExit(f"protoc ended with status {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the stubs are stale")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh = sorted(path for path in (Path(tmp) / "motet/v1").iterdir() if "_pb2" in path.name)
        if args.check:
            stale = [
                path.name
                for path in fresh
                if not (STUBS / path.name).exists() or not filecmp.cmp(path, STUBS / path.name, shallow=False)
            ]
            stale += [
                path.name
                for path in STUBS.iterdir()
                if "_pb2" in path.name and path.name not in {f.name for f in fresh}
            ]
            if stale:
                print(f"stale stubs, run `make stubs`: {', '.join(stale)}", file=sys.stderr)
                return 1
            print(f"{len(fresh)} stub files are up to date")
            return 0
        for path in fresh:
            shutil.copy(path, STUBS / path.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
