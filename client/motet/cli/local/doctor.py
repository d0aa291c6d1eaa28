"""`motet doctor`: examines an installation on this machine, and says what to do about what it finds."""

from __future__ import annotations

import argparse
import dataclasses
import json
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
    for finding in _findings(arguments.config, findings):
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
    for table, (settings_module, examination) in _MODULES_BY_TABLE.items():
        try:
            part = server_parts.load(settings_module)
        except server_parts.ServerPartMissing:
            yield findings.Finding(table, findings.State.OK, "not installed")
            continue
        try:
            settings = config.settings_of(part, path)
        except config.WrongSettings as error:
            advice = "give --config FILE; `motet config check FILE` shows the first mistake of each part"
            state = findings.State.WARNING if path is None else findings.State.WRONG  # perhaps they are all flags
            yield findings.Finding(f"{table}: settings", state, f"not examined further: {error}", advice)
            continue
        yield from server_parts.load(examination).examine(settings)


def version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
