"""`motet doctor`: examines an installation on this machine, and says what to do about what it finds."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from motet import __version__
from motet.cli import exits, server_parts
from motet.cli.context import Subparsers
from motet.cli.local import config

_MODULES_BY_TABLE = {
    "control-plane": ("control_plane.config", "control_plane.setup.examination"),
    "worker": ("data_plane.config", "data_plane.examination"),
    "gateway": ("gateway.config", "gateway.examination"),
}
_OURS = ("motet-contract", "motet-server", "motet-worker")
_PACKAGES = ("grpcio", "protobuf", "redis", "torch", "triton", "transformers", "safetensors", "llguidance")


def add_parser(commands: Subparsers) -> None:
    """Declares the command."""
    about = "examine this machine's installation: versions, Redis, store, certificates, clock, ports, GPU, compiler"
    parser = commands.add_parser("doctor", help="examine the installation on this machine", description=about)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings of the parts (default: MOTET_CONFIG and other MOTET_*)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, an object on each line")
    parser.set_defaults(run=_examine)


def _examine(arguments: argparse.Namespace) -> int:
    findings = server_parts.load("contract.settings.findings")
    is_wrong = False
    path: Path | None = arguments.config
    if path is None and os.environ.get("MOTET_CONFIG"):
        path = Path(os.environ["MOTET_CONFIG"])
    for finding in _findings(path, findings):
        is_wrong = is_wrong or finding.state is findings.State.WRONG
        if arguments.json:
            print(json.dumps(dataclasses.asdict(finding) | {"state": finding.state.value}), flush=True)
            continue
        print(f"{finding.state.value:<8} {finding.what}: {finding.detail}", flush=True)
        if finding.advice:
            print(f"{'':<8} -> {finding.advice}", flush=True)
    return exits.FAILED if is_wrong else exits.OK


def _findings(path: Path | None, findings: Any) -> Iterator[Any]:
    yield findings.Finding(
        "motet", findings.State.OK, f"{__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    for name in _OURS:
        if (found := version_of(name)) not in ("", __version__):
            advice = f"install the same versions: pip install {name}=={__version__}"
            yield findings.Finding(name, findings.State.WRONG, f"{found}, and motet is {__version__}", advice)
    versions = ", ".join(f"{name} {found}" for name in _PACKAGES if (found := version_of(name)))
    yield findings.Finding("packages", findings.State.OK, versions or "none of the server's")
    tables = _tables_of(path)
    for table, (settings_module, examination) in _MODULES_BY_TABLE.items():
        try:
            part = server_parts.load(settings_module)
        except server_parts.ServerPartMissing:
            yield findings.Finding(table, findings.State.OK, "not installed")
            continue
        try:
            settings = config.settings_of(part, path)
            if tables is not None and table == "gateway" and table not in tables:
                continue  # this machine is to run none
        except config.WrongSettings as error:
            state, advice = findings.State.WRONG, f"correct it; `motet config check {path}` reads the file again"
            if path is None:  # perhaps they are all flags
                state, advice = findings.State.WARNING, "give the settings with --config FILE, or as MOTET_* variables"
            yield findings.Finding(f"{table}: settings", state, f"not examined further: {error}", advice)
            continue
        yield from server_parts.load(examination).examine(settings)


def _tables_of(path: Path | None) -> frozenset[str] | None:
    """Names of the tables in the file of settings; None without one, or where it cannot be read."""
    if path is None:
        return None
    try:
        return frozenset(server_parts.load("contract.settings.config_file").read(path))
    except ValueError:
        return None


def version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
