"""Builds Motet's four wheels, byte for byte the same from the same commit: `make dist`.

| distribution | import names | installed by |
|---|---|---|
| motet | motet: the SDK and the command | pip install motet |
| motet-contract | contract: what both server sides share | the two below |
| motet-server | control_plane, gateway; no torch | pip install 'motet[server]' |
| motet-worker | data_plane, kernels | pip install 'motet[worker]' |

What a distribution needs is read from the dependency groups of pyproject.toml, so that it is written once. Only files
that git tracks are packed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The oldest releases that Motet runs with where the tested ones (constraints.txt) are not demanded: machines with a GPU
# bring their own torch.
LOWEST = {"torch": "2.11", "transformers": "5.0", "grpcio": "1.74", "protobuf": "6.31.1"}
_PACKAGE_DATA = ["*.c", "*.h", "*.pyi", "py.typed"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """One wheel."""

    name: str
    description: str
    packages: tuple[str, ...]  # top-level folders
    groups: tuple[str, ...]  # of pyproject.toml's dependency groups
    needs: tuple[str, ...] = ("motet",)  # distributions of this table, of the same version


DISTRIBUTIONS = (
    Distribution(
        "motet-contract",
        "What the server and the workers of Motet share: settings, formats and the plan stream's messages",
        ("contract",),
        (),
    ),
    Distribution(
        "motet-server",
        "Control plane and HTTP gateway of Motet, which serves one language model with many LoRA adapters",
        ("control_plane", "gateway"),
        ("control-plane", "gateway"),
        ("motet", "motet-contract"),
    ),
    Distribution(
        "motet-worker",
        "Worker of Motet: runs one language model with many LoRA adapters in one batch",
        ("data_plane", "kernels"),
        ("worker",),
        ("motet", "motet-contract"),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    out: Path = parser.parse_args().out.resolve()
    os.umask(0o022)  # modes are written into wheels
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"SOURCE_DATE_EPOCH": _commit_time()}
    version = motet_version()
    with tempfile.TemporaryDirectory() as folder:
        stages = [_stage_client(Path(folder) / "motet")]
        stages += [stage(item, version, Path(folder) / item.name) for item in DISTRIBUTIONS]
        for directory in stages:
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
            command += ["--no-build-isolation", "--wheel-dir", str(out), str(directory)]
            subprocess.run(command, check=True, env=environment)
    for wheel in sorted(out.glob(f"motet*-{version}-*.whl")):
        print(wheel.name)
    return 0


def motet_version() -> str:
    """The one version of all distributions."""
    text = (ROOT / "client" / "motet" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None, "client/motet/__init__.py has no line __version__ = ..."
    return found[1]


def requirements(group: str) -> list[str]:
    """A dependency group of pyproject.toml, with the tested or lowest version as the lower bound of each."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    tested = dict(
        line.lower().split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    )
    found = []
    for requirement in groups[group]:
        spec, _, marker = requirement.partition(";")
        name = spec.partition("[")[0].strip()
        bound = f"{spec.strip()}>={LOWEST.get(name) or tested[name.lower()]}"
        found.append(f"{bound}; {marker.strip()}" if marker else bound)
    return found


def stage(item: Distribution, version: str, directory: Path) -> Path:
    """A folder that setuptools can build: the tracked files of the packages, and a pyproject.toml."""
    for package in item.packages:
        _copy_tracked(package, directory)
    shutil.copyfile(ROOT / "LICENSE", directory / "LICENSE")
    (directory / "README.md").write_text(f"{item.description}. It is installed by `pip install 'motet[...]'`.\n")
    needs = [f"{name}=={version}" for name in item.needs]
    needs += sorted({requirement for group in item.groups for requirement in requirements(group)})
    lines = [
        "[build-system]",
        'requires = ["setuptools>=77"]',
        'build-backend = "setuptools.build_meta"',
        "[project]",
        f'name = "{item.name}"',
        f'version = "{version}"',
        f'description = "{item.description}"',
        'readme = "README.md"',
        'license = "Apache-2.0"',
        'license-files = ["LICENSE"]',
        'requires-python = ">=3.11"',
        f"dependencies = {needs!r}",
        "[tool.setuptools.packages.find]",
        f"include = {[pattern for package in item.packages for pattern in (package, package + '.*')]!r}",
        "[tool.setuptools.package-data]",
        f'"*" = {_PACKAGE_DATA!r}',
    ]
    (directory / "pyproject.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


def _stage_client(directory: Path) -> Path:
    _copy_tracked("client", directory)
    return directory / "client"


def _copy_tracked(folder: str, target: Path) -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", folder], check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place)
        place.chmod(0o644)


def _commit_time() -> str:
    """Of the commit that is built, for the times within the wheels, in seconds since 1970."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"], check=True, capture_output=True, text=True
    )
    return listed.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
