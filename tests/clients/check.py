"""`make check-clients`: programs of other people's packages against a gateway, each package in its own environment.

The packages need versions of each other that do not fit together, so that they are not among the tests' own. The
environments are made once in `.venv-clients/`, from `environments/`. Without npm it fails, too: nothing is left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.served_api import serve

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / "environments"
# Packages that a program runs with, and the program.
PYTHON = {"openai-2": "openai_python.py", "langchain": "langchain_python.py", "litellm": "litellm_python.py"}
_TIMEOUT_S = 300


def make_environment(directory: Path, name: str) -> Path:
    """The interpreter that has the packages of `environments/NAME.txt`."""
    packages = (ENVIRONMENTS / f"{name}.txt").read_text()
    environment = directory / name
    stamp, python = environment / "packages.txt", environment / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != packages:
        print(f"== installing {name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
        subprocess.run([*pip, "-r", str(ENVIRONMENTS / f"{name}.txt")], check=True, env=_without_motet())
        stamp.write_text(packages)
    return python


def make_node_packages(directory: Path) -> Path:
    """The folder that has the packages of `environments/package.json`."""
    packages = (ENVIRONMENTS / "package.json").read_text()
    folder = directory / "node"
    installed = folder / "package.json"
    if not installed.exists() or installed.read_text() != packages or not (folder / "node_modules").is_dir():
        print("== installing Node's packages", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        installed.write_text(packages)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder, check=True)
    return folder


def main() -> int:
    """Exit status 1 where a program failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=Path(".venv-clients"), help="folder for the packages")
    directory = parser.parse_args().environments.resolve()
    programs: list[tuple[str, list[str], dict[str, str]]] = [
        ("openai, as the tests have it", [sys.executable, str(HERE / "programs" / "openai_python.py")], {})
    ]
    for name, program in PYTHON.items():
        command = [str(make_environment(directory, name)), str(HERE / "programs" / program)]
        # LiteLLM looks for prices on the internet without it.
        programs.append((name, command, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}))
    node = shutil.which("node") if shutil.which("npm") else None
    if node:
        folder = make_node_packages(directory)
        command = [node, str(HERE / "programs" / "openai_node.mjs")]
        programs.append(("openai of npm", command, {"NODE_PACKAGES": str(folder)}))
    failed: list[str] = [] if node else ["openai of npm: node or npm is missing"]
    with tempfile.TemporaryDirectory(prefix="motet-clients-") as work_dir, serve(Path(work_dir)) as served:
        for name, command, more in programs:
            print(f"== {name}", flush=True)
            if subprocess.run(
                command, env={**_without_motet(), **served.environment, **more}, timeout=_TIMEOUT_S
            ).returncode:
                failed.append(name)
    print("failed: " + "; ".join(failed) if failed else "all clients passed")
    return 1 if failed else 0


def _without_motet() -> dict[str, str]:
    """This environment without the checkout: the programs have nothing but an address and a key."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    sys.exit(main())
