"""What `import motet` offers and what it costs."""

from __future__ import annotations

import ast
import os
import pkgutil
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


# What type checkers see: the module of each name.
MODULE_BY_NAME = {
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(motet.__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("motet.")
    for alias in node.names
}


@pytest.mark.parametrize("name", sorted(MODULE_BY_NAME))
def test_every_name_is_there_and_comes_from_its_module(name: str) -> None:
    value = getattr(motet, name)
    assert value.__name__ == name and value.__module__ == MODULE_BY_NAME[name]


def test_the_names_at_run_time_are_those_of_type_checkers() -> None:
    assert {name for name in dir(motet) if name[0].isupper() and name != "TYPE_CHECKING"} == set(MODULE_BY_NAME)


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


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel of client/."""
    source = tmp_path_factory.mktemp("build") / "client"
    shutil.copytree(CLIENT, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist"))
    program = "import setuptools.build_meta as b; b.build_sdist('out'); b.build_wheel('out')"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, timeout=120, capture_output=True)
    return source / "out"


def test_distributions_carry_license_readme_types_and_the_version(distributions: Path) -> None:
    name = f"motet-{motet.__version__}"
    with tarfile.open(distributions / f"{name}.tar.gz") as sdist:
        names = sdist.getnames()
    assert {f"{name}/LICENSE", f"{name}/README.md", f"{name}/motet/py.typed"} <= set(names)
    with zipfile.ZipFile(distributions / f"{name}-py3-none-any.whl") as wheel:
        names = wheel.namelist()
        metadata = wheel.read(f"{name}.dist-info/METADATA").decode()
        license_text = wheel.read(f"{name}.dist-info/licenses/LICENSE").decode()
    assert {"motet/py.typed", "motet/v1/types_pb2.pyi", "motet/cli/main.py"} <= set(names)
    assert license_text == (CLIENT.parent / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in license_text and "END OF TERMS AND CONDITIONS" in license_text
    fields, _, readme = metadata.partition("\n\n")
    assert {f"Version: {motet.__version__}", "License-Expression: Apache-2.0"} <= set(fields.splitlines())
    assert "Description-Content-Type: text/markdown" in fields and readme.startswith("# motet\n")


def test_wheel_works_alone_and_has_no_stubs_of_the_plan_stream(distributions: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        assert [name for name in wheel.namelist() if "plan" in name] == []
        wheel.extractall(tmp_path)
    program = f"""
import importlib.util, sys
import motet, motet.cli.main
assert motet.__file__.startswith({str(tmp_path)!r})
assert importlib.util.find_spec("contract") is None
[getattr(motet, name) for name in dir(motet)]
sys.exit(motet.cli.main.main(["up", "model"]))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment, timeout=60, capture_output=True, text=True
    )
    assert run.returncode == 1 and "'control_plane' is not installed: pip install 'motet[server]'" in run.stderr, (
        run.stderr
    )


def test_servers_load_none_of_the_clients_code() -> None:
    """Nor what it needs: they use the stubs, the version, the form of a command line and of an audit log."""
    program = """
import sys
import data_plane.stream.plan_client, data_plane.config, data_plane.adapters.format.sources
assert not {"google.rpc", "google.longrunning"} & set(sys.modules)
import control_plane.server
print(*sorted(name for name in sys.modules if name.startswith("motet.") and not name.startswith("motet.v1")))
"""
    environment = server_parts.child_environment()
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    assert run.stdout.split() == [
        "motet.audit",
        "motet.audit.chain",
        "motet.command_line",
        "motet.lora_module_ids",
        "motet.tls",
    ]


def test_import_contract_names_every_module_of_the_client() -> None:
    settings = tomllib.loads((CLIENT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    [forbidden] = [c["forbidden_modules"] for c in contracts if c["name"].startswith("servers use the SDK's stubs")]
    modules = {f"motet.{info.name}" for info in pkgutil.iter_modules(motet.__path__) if not info.name.startswith("__")}
    used = {"motet.v1", "motet.audit", "motet.command_line", "motet.lora_module_ids", "motet.tls"}
    assert set(forbidden) == modules - used
