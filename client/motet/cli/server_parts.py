"""`motet control-plane`, `motet worker` and `motet gateway`: hand the command line to the server parts.

The package `motet` holds the client only. The server parts are distributions of their own, or lie beside it in a
checkout; they are imported when needed and not before.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).resolve().parents[3]
_EXTRA_BY_PACKAGE = {"control_plane": "server", "gateway": "server", "data_plane": "worker", "contract": "server"}


class ServerPartMissing(Exception):
    """The server part cannot be imported; the text says what to do."""


def run_control_plane(argv: Sequence[str]) -> int:
    """`motet control-plane ARGS`."""
    code: int = load("control_plane.server").main(list(argv))
    return code


def run_worker(argv: Sequence[str]) -> int:
    """`motet worker ARGS`."""
    code: int = load("data_plane.worker").main(list(argv))
    return code


def run_gateway(argv: Sequence[str]) -> int:
    """`motet gateway ARGS`."""
    code: int = load("gateway.main").main(list(argv))
    return code


def load(module: str) -> ModuleType:
    """A module of the server. Raises ServerPartMissing."""
    package = module.partition(".")[0]
    extra = _EXTRA_BY_PACKAGE.get(package, "server")
    if importlib.util.find_spec(package) is None:
        if not (CHECKOUT / package / "__init__.py").is_file():
            raise ServerPartMissing(
                f"the server part {package!r} is not installed: pip install 'motet[{extra}]', or run `make setup` in a "
                "checkout of Motet's repository, and this command in its environment"
            )
        sys.path.insert(0, str(CHECKOUT))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ServerPartMissing(
            f"{module} needs the Python package {error.name!r}, not installed: pip install 'motet[{extra}]'"
        ) from error


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment in which a child process finds the server parts and the SDK, as this process does."""
    environment = dict(environ)
    if (CHECKOUT / "control_plane" / "__init__.py").is_file():
        paths = [str(CHECKOUT), str(CHECKOUT / "client"), environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment
