"""What `import motet` offers and what it costs."""

from __future__ import annotations

import subprocess
import sys

import motet
import pytest
from motet.cli import server_parts


@pytest.mark.parametrize("name", sorted(motet._MODULE_BY_NAME))
def test_every_name_is_there_and_comes_from_its_module(name: str) -> None:
    value = getattr(motet, name)
    assert value.__name__ == name and value.__module__ == motet._MODULE_BY_NAME[name]
    assert name in dir(motet)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Clint"):
        _ = motet.Clint  # type: ignore[attr-defined]  # the point of the test


def test_stubs_for_the_worker_need_none_of_the_clients_packages() -> None:
    program = """
import sys
import motet.fingerprint
assert "grpc" not in sys.modules
import motet.v1.plan_pb2, motet.v1.types_pb2
assert not {"motet.client", "google.rpc", "google.longrunning"} & set(sys.modules)
"""
    environment = server_parts.child_environment()
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
