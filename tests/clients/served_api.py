"""A gateway before a real worker, under keys, for programs that know nothing of Motet but an address and a key.

The model writes reasoning, tool calls and text, as `tests/gateway/chats/chained_system.py` describes it. The key
`limited` belongs to a tenant with one request a minute.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from motet import Client

from control_plane.access.authentication.grants import Grant
from control_plane.access.authentication.key_file import change_keys, new_key
from control_plane.access.principal import Role
from tests.clients.chained_checkpoint import make_chained_checkpoint
from tests.e2e.harness import System
from tests.gateway.gateway_process import Gateway
from tests.makers import make_adapter
from tests.secret_scan import SCAN

FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "512", "--max-rows", "8"]
FLAGS += ["--max-model-len", "512", "--num-slots", "4", "--arena-bytes", "64MiB"]
_TENANTS = {"acme": {}, "limited": {"requests_per_minute": 1}}


@dataclass(frozen=True)
class ServedApi:
    """Where it is, and what a program may use: the base model `chained` and its adapter `plain`."""

    url: str  # of the gateway, without /v1
    key: str
    limited_key: str

    @property
    def environment(self) -> Mapping[str, str]:
        """What the programs of `programs/` read."""
        return {"MOTET_URL": self.url, "MOTET_KEY": self.key, "MOTET_LIMITED_KEY": self.limited_key}


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[ServedApi]:
    """Serve a model that is made in `directory`, until the end of the context."""
    checkpoint = make_chained_checkpoint(directory / "chained")
    adapter = make_adapter(directory / "plain", checkpoint, rank=2, targets=["q_proj"])
    keys: dict[str, str] = {}
    known = []
    for tenant in _TENANTS:
        roles = (Role.INFER, Role.ADAPTERS_READ, Role.ADAPTERS_WRITE)
        record, keys[tenant] = new_key(set(), Grant(tenants=(tenant,), roles=roles, adapters=("*",)))
        SCAN.plant(f"the key of {tenant}", keys[tenant])
        known.append(record)
    change_keys(directory / "keys.json", lambda _: tuple(known), may_create=True)
    (directory / "tenants.json").write_text(json.dumps(_TENANTS))
    flags = ["--api-keys", str(directory / "keys.json"), "--tenants", str(directory / "tenants.json")]
    with System(checkpoint, directory, control_flags=flags) as system:
        system.start_worker(flags=FLAGS)
        with Client(system.address, api_key=keys["acme"]) as client:
            client.adapters.register("plain", adapter)
        with Gateway(system.address, directory) as gateway:
            yield ServedApi(gateway.url, keys["acme"], keys["limited"])
