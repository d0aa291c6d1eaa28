"""Writes the Python stubs of protos/motet/v1 into client/motet/v1, or checks that they are up to date.

Also copies the protos of Google that Motet's need into protos/google, so that `protoc -I protos` alone compiles them in
any language; Python takes the stubs of those from googleapis-common-protos. Run by `make stubs` and `make check-stubs`
with grpcio-tools 1.74.0: stubs of newer tools refuse to load on protobuf 6. Usage: generate.py [--check].
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import grpc_tools.protoc

PROTOS = Path(__file__).resolve().parent
STUBS = PROTOS.parent / "client" / "motet" / "v1"
COMMON = Path(str(distribution("googleapis-common-protos").locate_file("")))
# What adapters.proto imports with all that it needs, and the details of errors. Every protoc brings google/protobuf.
GOOGLE_PROTOS = (
    "google/api/annotations.proto",
    "google/api/client.proto",
    "google/api/field_behavior.proto",
    "google/api/http.proto",
    "google/api/launch_stage.proto",
    "google/longrunning/operations.proto",
    "google/rpc/error_details.proto",
    "google/rpc/status.proto",
)
# googleapis-common-protos ships this file under another name than the one that it registers.
_SHIPPED_AS = {"google/longrunning/operations.proto": "google/longrunning/operations_proto.proto"}


def generate(out: Path) -> None:
    """Compile every .proto below motet/v1 into `out`/motet/v1."""
    well_known = Path(grpc_tools.protoc.__file__).parent / "_proto"
    code = grpc_tools.protoc.main(
        ["protoc", f"-I{PROTOS}", f"-I{well_known}"]
        + [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
        + [str(path) for path in sorted((PROTOS / "motet/v1").glob("*.proto"))]
    )
    if code != 0:
        raise SystemExit(f"protoc ended with status {code}")


def stale_google_protos() -> list[str]:
    """Names of Google's protos whose copy is missing or another one."""
    return [name for name in GOOGLE_PROTOS if not _is_same(COMMON / _SHIPPED_AS.get(name, name), PROTOS / name)]


def copy_google_protos() -> None:
    """Take all of them from googleapis-common-protos."""
    for name in GOOGLE_PROTOS:
        (PROTOS / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(COMMON / _SHIPPED_AS.get(name, name), PROTOS / name)


def stale_stubs(fresh: list[Path]) -> list[str]:
    """Names of stubs that differ from the fresh ones, are missing, or belong to no proto."""
    names = {path.name for path in fresh}
    left_over = [path.name for path in STUBS.iterdir() if "_pb2" in path.name and path.name not in names]
    return [path.name for path in fresh if not _is_same(path, STUBS / path.name)] + left_over


def _is_same(source: Path, copy: Path) -> bool:
    return copy.exists() and filecmp.cmp(source, copy, shallow=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is stale")
    args = parser.parse_args()
    if not args.check:
        copy_google_protos()
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh = sorted(path for path in (Path(tmp) / "motet/v1").iterdir() if "_pb2" in path.name)
        if not args.check:
            for path in fresh:
                shutil.copy(path, STUBS / path.name)
            return 0
        stale = stale_google_protos() + stale_stubs(fresh)
    if stale:
        print(f"stale files, run `make stubs`: {', '.join(stale)}", file=sys.stderr)
        return 1
    print(f"{len(fresh)} stub files and {len(GOOGLE_PROTOS)} protos of Google are up to date")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
