"""What `import motet` offers and what it costs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import motet
import pytest
from motet.cli import server_parts
from motet.cli.main import main

CLIENT = Path(motet.__file__).resolve().parents[1]


@pytest.mark.parametrize("name", sorted(motet._MODULE_BY_NAME))
def test_every_name_is_there_and_comes_from_its_module(name: str) -> None:
    value = getattr(motet, name)
    assert value.__name__ == name and value.__module__ == motet._MODULE_BY_NAME[name]
    assert name in dir(motet)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Clint"):
        _ = motet.Clint  # type: ignore[attr-defined]  # the point of the test


def test_one_version_number(capsys: pytest.CaptureFixture[str]) -> None:
    """The package, the command and the server's status (tests/control_plane/api/test_status.py) tell the same one."""
    settings = tomllib.loads((CLIENT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in settings["project"] and settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "motet.__version__"}
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"motet {motet.__version__}\n"


def test_distributions_carry_license_readme_types_and_the_version(tmp_path: Path) -> None:
    source = tmp_path / "client"
    shutil.copytree(CLIENT, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist"))
    program = "import setuptools.build_meta as b; b.build_sdist('out'); b.build_wheel('out')"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, timeout=120, capture_output=True)
    name = f"motet-{motet.__version__}"
    with tarfile.open(source / "out" / f"{name}.tar.gz") as sdist:
        names = sdist.getnames()
    assert {f"{name}/LICENSE", f"{name}/README.md", f"{name}/motet/py.typed"} <= set(names)
    with zipfile.ZipFile(source / "out" / f"{name}-py3-none-any.whl") as wheel:
        names = wheel.namelist()
        metadata = wheel.read(f"{name}.dist-info/METADATA").decode()
        license_text = wheel.read(f"{name}.dist-info/licenses/LICENSE").decode()
    assert {"motet/py.typed", "motet/v1/plan_pb2.pyi", "motet/cli/main.py"} <= set(names)
    assert license_text == (CLIENT.parent / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in license_text and "END OF TERMS AND CONDITIONS" in license_text
    fields, _, readme = metadata.partition("\n\n")
    assert {f"Version: {motet.__version__}", "License-Expression: Apache-2.0"} <= set(fields.splitlines())
    assert "Description-Content-Type: text/markdown" in fields and readme.startswith("# motet\n")


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
