"""Writes the Python stubs of protos/motet and protos/keda, or checks that they are up to date.

The stubs of the public API go into the SDK (client/motet/v1), those of the plan stream into contract/v1: the SDK is
installed alone and must not carry them. Those of KEDA's external scaler belong to the control plane alone.

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
import sampling_classes
import status_classes
from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTOS = Path(__file__).resolve().parent
ROOT = PROTOS.parent
# Where the stubs of each folder of protos are, and the package that they are imported from there.
STUBS = {
    "motet/v1": (ROOT / "client" / "motet" / "v1", "motet.v1"),
    "motet/worker/v1": (ROOT / "contract" / "v1", "contract.v1"),
    "keda": (ROOT / "control_plane" / "scaler" / "v1", "control_plane.scaler.v1"),
}
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


def generate(out: Path) -> list[tuple[Path, Path]]:
    """Compile every .proto of STUBS into `out`; each stub there with the place that it belongs to."""
    well_known = Path(grpc_tools.protoc.__file__).parent / "_proto"
    code = grpc_tools.protoc.main(
        ["protoc", f"-I{PROTOS}", f"-I{well_known}"]
        + [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
        + [f"--descriptor_set_out={out / 'described'}", "--include_source_info"]
        + [str(path) for folder in STUBS for path in sorted((PROTOS / folder).glob("*.proto"))]
    )
    if code != 0:
        raise SystemExit(f"protoc ended with status {code}")
    stubs = []
    for folder, (directory, package) in STUBS.items():
        for path in sorted(path for path in (out / folder).iterdir() if "_pb2" in path.name):
            # protoc derives the imports of a stub from the folder of its proto.
            source = path.read_text(encoding="utf-8")
            imported = f"from {folder.replace('/', '.')} import"
            path.write_text(source.replace(imported, f"from {package} import"), encoding="utf-8")
            stubs.append((path, directory / path.name))
    sys.path.insert(0, str(out))  # for the options of fields
    described = FileDescriptorSet.FromString((out / "described").read_bytes())
    (status,) = (file for file in described.file if file.name == "motet/v1/status.proto")
    classes = sampling_classes.sources() | {"client/motet/v1/status.py": status_classes.source(status)}
    for name, text in classes.items():
        source = out / name.replace("/", "_")
        source.write_text(text, encoding="utf-8")
        stubs.append((source, ROOT / name))
    return stubs


def stale_google_protos() -> list[str]:
    """Names of Google's protos whose copy is missing or another one."""
    return [name for name in GOOGLE_PROTOS if not _is_same(COMMON / _SHIPPED_AS.get(name, name), PROTOS / name)]


def copy_google_protos() -> None:
    """Take all of them from googleapis-common-protos."""
    for name in GOOGLE_PROTOS:
        (PROTOS / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(COMMON / _SHIPPED_AS.get(name, name), PROTOS / name)


def stale_stubs(fresh: list[tuple[Path, Path]]) -> list[str]:
    """Names of stubs that differ from the fresh ones, are missing, or belong to no proto."""
    expected = {stub for _, stub in fresh}
    found = [path for directory, _ in STUBS.values() for path in directory.iterdir() if "_pb2" in path.name]
    stale = [stub for source, stub in fresh if not _is_same(source, stub)]
    return [str(path.relative_to(ROOT)) for path in [*stale, *sorted(set(found) - expected)]]


def _is_same(source: Path, copy: Path) -> bool:
    return copy.exists() and filecmp.cmp(source, copy, shallow=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is stale")
    args = parser.parse_args()
    if not args.check:
        copy_google_protos()
    with tempfile.TemporaryDirectory() as tmp:
        fresh = generate(Path(tmp))
        if not args.check:
            for source, stub in fresh:
                shutil.copy(source, stub)
            return 0
        stale = stale_google_protos() + stale_stubs(fresh)
    if stale:
        print(f"stale files, run `make stubs`: {', '.join(stale)}", file=sys.stderr)
        return 1
    print(f"{len(fresh)} stub files and {len(GOOGLE_PROTOS)} protos of Google are up to date")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
