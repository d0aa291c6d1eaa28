"""The Dockerfiles in deploy/images, without Docker: what they copy is there, and what they run does what they say.

Each word of a step is read from the Dockerfile, so a change there is tried here.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.control_plane.server_processes import ROOT

IMAGES = ROOT / "deploy" / "images"
FILES = sorted(IMAGES.glob("*.Dockerfile"))
STEP_S = 120.0
BUILT = ("motet", "motet-contract", "motet-server", "motet-worker")  # by `make dist`


def steps(file: Path) -> list[tuple[str, str]]:
    """Instructions with their arguments; lines that are continued are one."""
    text = "".join(line for line in file.read_text("utf-8").splitlines(keepends=True) if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def arguments(file: Path, instruction: str) -> list[str]:
    return [rest for word, rest in steps(file) if word == instruction]


def commands(file: Path) -> list[list[str]]:
    """Those of all RUN steps, word by word."""
    return [shlex.split(part) for rest in arguments(file, "RUN") for part in rest.split("&&")]


def installs(file: Path) -> list[list[str]]:
    """Words behind `pip install`."""
    return [words[2:] for words in commands(file) if words[0].endswith("/pip") and words[1] == "install"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first COPY step makes: the wheels and the constraints."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(ROOT / "deploy" / "wheels" / "build.py"), "--out", str(folder)]
    subprocess.run(command, check=True, timeout=STEP_S, capture_output=True)
    (folder / "constraints.txt").write_bytes((ROOT / "constraints.txt").read_bytes())
    return folder


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_copied_is_in_the_context_or_in_the_first_stage(file: Path, dist: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert ignored[0] == "*"
    kept = [pattern.removeprefix("!") for pattern in ignored[1:]]
    built = {f"dist/{wheel.name}" for wheel in dist.glob("*.whl")}
    made_by_stage = {words[3] for words in commands(file) if words[:3] == ["python", "-m", "venv"]}
    for rest in arguments(file, "COPY"):
        if rest.startswith("--from=build "):
            source, target = rest.split()[1:]
            assert source in made_by_stage and source == target, "a virtual environment cannot be moved"
            continue
        *sources, target = rest.split()
        assert target == "/dist/"
        for source in sources:
            found = [name for name in (*built, "constraints.txt") if fnmatch.fnmatch(name, source)]
            assert found, f"{source} is not there"
            assert all(any(fnmatch.fnmatch(name, pattern) for pattern in kept) for name in found), "it is ignored"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_wheels_satisfy_what_pip_is_to_install(file: Path, dist: Path) -> None:
    """pip resolves the step's own words, with the built wheels and what is installed here; nothing is fetched.

    An extra that a wheel does not have, or a version that the constraints forbid, fails.
    """
    words = installs(file)[-1]
    assert words[words.index("--find-links") + 1] == "/dist" and words[words.index("-c") + 1] == "/dist/constraints.txt"
    words = [word.replace("/dist", str(dist)) for word in words]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--no-index"]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*command, *words], env=variables, timeout=STEP_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stdout + done.stderr
    part = file.stem
    [line] = [line for line in done.stdout.splitlines() if line.startswith("Would install")]
    would = {word.rsplit("-", 1)[0] for word in line.split()[2:]}
    assert f"motet-{part}" in would and would <= set(BUILT), f"what is missing here would be fetched: {would}"
    other = "worker" if part == "server" else "server"
    assert f"motet-{other}" not in would


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_extra_is_one_of_the_client(file: Path, dist: Path) -> None:
    [wheel] = dist.glob("motet-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        extras = set(message_from_string(archive.read(name).decode()).get_all("Provides-Extra") or [])
    [requirement] = [word for word in installs(file)[-1] if word.startswith("motet[")]
    wanted = set(re.findall(r"[\w-]+", requirement)[1:])
    assert wanted <= extras
    if file.stem == "server":
        assert {"server", "tracing", "top"} <= wanted, "nothing can be installed in a container later"


def test_the_workers_torch_is_that_of_the_constraints() -> None:
    [words] = [words for words in installs(IMAGES / "worker.Dockerfile") if any(w.startswith("torch") for w in words)]
    [pinned] = [word for word in words if word.startswith("torch==")]
    assert f'"{pinned}"' in (ROOT / "Makefile").read_text("utf-8")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_folders_and_user_are_those_of_the_manifests(file: Path) -> None:
    [user] = arguments(file, "USER")
    folders = yaml.safe_load(arguments(file, "VOLUME")[0])
    [folder] = arguments(file, "WORKDIR")
    assert folder in folders and "/tmp" in folders
    made = [words for words in commands(file) if words[0] == "install"]
    assert made == [["install", "-d", "-o", "65532", "-g", "65532", "-m", "0700", folder]]
    manifests = yaml.safe_load_all((ROOT / "deploy/kubernetes/motet.yaml").read_text("utf-8"))
    pods = [
        each["spec"]["template"]["spec"] for each in manifests if each and each["kind"] in ("Deployment", "StatefulSet")
    ]
    mine = [pod for pod in pods if f"motet-{file.stem}" in pod["containers"][0]["image"]]
    assert mine
    for pod in mine:
        assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == user
        mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert "/tmp" in mounts
    assert any(folder in {m["mountPath"] for m in pod["containers"][0]["volumeMounts"]} for pod in mine)
    ports = {int(port) for pod in mine for port in (p["containerPort"] for p in pod["containers"][0]["ports"])}
    exposed = {int(port) for port in arguments(file, "EXPOSE")[0].split()}
    assert ports - {50053} <= exposed, "but for the scaler's, which is off by default"
