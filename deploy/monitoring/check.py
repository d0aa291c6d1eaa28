"""Tries every query of the dashboards and alerts on a live system under load: `make check-monitoring`.

Starts Motet with a small model, Prometheus (Debian's package `prometheus`) beside it, sends requests with and without
adapters, some of them wrong, and has Prometheus evaluate each query: one without a series fails. Prints a line for
each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from motet import Client
from motet.errors import MotetError

from benchmarks.system import System
from deploy.monitoring.generate import FOLDER
from deploy.monitoring.queries import ALERTS, DASHBOARDS, RATE
from tests.makers import make_adapter, make_checkpoint

_INTERVAL_S = 1  # between two scrapes
_NUM_ADAPTERS = 3
_STORE_CALLS_S = 4  # before the queries; those look at the latest 10 scrapes


def main() -> int:
    """Try all queries; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load-s", type=float, default=20.0, help="seconds of load before the queries (default 20)")
    arguments = parser.parse_args()
    if shutil.which("prometheus") is None:
        print("prometheus is not here: apt-get install prometheus, or put it into PATH", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="motet-monitoring-") as name:
        return _try_all(Path(name), arguments.load_s)


def _try_all(work_dir: Path, load_s: float) -> int:
    model = make_checkpoint(work_dir / "model", arch="llama")
    ports = [_free_port() for _ in range(3)]
    flags = ["--metrics-listen", f"127.0.0.1:{ports[0]}"]
    with System(model, work_dir / "system", control_flags=flags) as system:
        worker_flags = ["--device", "cpu", "--threads", "1", "--worker-metrics-listen", f"127.0.0.1:{ports[1]}"]
        worker_flags += ["--num-slots", str(_NUM_ADAPTERS - 1)]  # so that adapters are loaded again and again
        worker_flags += ["--pinned-bytes", "64MiB"]
        system.start_worker("w0", worker_flags)
        with _prometheus(work_dir, ports[2], ports[:2]) as url, Client(system.address) as client:
            *first, last = [
                make_adapter(work_dir / f"a{number}", model, rank=4, alpha=8, targets=["q_proj"], seed=number)
                for number in range(_NUM_ADAPTERS + 1)
            ]
            for number, directory in enumerate(first):
                client.adapters.register(f"a{number}", directory)
            ended = threading.Event()
            load = [threading.Thread(target=_load, args=(client, ended, seed)) for seed in range(4)]
            for thread in load:
                thread.start()
            try:
                ended.wait(max(load_s - _STORE_CALLS_S, 0.0))
                client.adapters.register("late", last)  # loads find the others in the host cache, and call no store
                ended.wait(_STORE_CALLS_S)
                return _try_queries(url)
            finally:
                ended.set()
                for thread in load:
                    thread.join()


def _load(client: Client, ended: threading.Event, seed: int) -> None:
    names = ["", *(f"a{number}" for number in range(_NUM_ADAPTERS)), "nobody's"]
    turn = seed
    while not ended.is_set():
        turn += 1
        prompt = [8 + turn % 5] * 40  # long enough for the prefix cache
        try:
            for _ in client.generate(prompt, adapter=names[turn % len(names)], max_tokens=16, ignore_eos=True):
                pass
        except MotetError:
            continue  # "nobody's" is not an adapter: refusals are counted, too


def _try_queries(url: str) -> int:
    queries = [
        (f"{dashboard.title}, {panel.title}: {query.legend}", query.expression.replace(RATE, f"{10 * _INTERVAL_S}s"))
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for query in panel.queries
    ]
    queries += [(f"evidence of {alert.name}", alert.evidence) for alert in ALERTS]
    num_failed = 0
    for what, expression in queries:
        series = _get(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")["result"]
        values = [each["value"][1] for each in series]
        is_ok = bool(values) and any(value != "NaN" for value in values)
        num_failed += not is_ok
        print(f"{'ok    ' if is_ok else 'FAILED'} {what}: {len(values)} series, {', '.join(values[:4])}", flush=True)
    for rule in (rule for group in _get(f"{url}/api/v1/rules")["groups"] for rule in group["rules"]):
        is_ok = rule["health"] == "ok"
        num_failed += not is_ok
        print(f"{'ok    ' if is_ok else 'FAILED'} rule {rule['name']}: {rule['state']} {rule.get('lastError', '')}")
    print(f"{len(queries)} queries and {len(ALERTS)} rules: {num_failed} failed")
    return 1 if num_failed else 0


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)["data"]


@contextmanager
def _prometheus(work_dir: Path, port: int, targets: list[int]) -> Iterator[str]:
    """Prometheus with the committed rules; its URL."""
    config = {
        "global": {"scrape_interval": f"{_INTERVAL_S}s", "evaluation_interval": f"{_INTERVAL_S}s"},
        "rule_files": [str(FOLDER / "alerts.yml")],
        "scrape_configs": [
            {"job_name": "motet", "static_configs": [{"targets": [f"127.0.0.1:{target}" for target in targets]}]}
        ],
    }
    file = work_dir / "prometheus.json"  # JSON is YAML
    file.write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={work_dir / 'tsdb'}"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    url = f"http://127.0.0.1:{port}"
    with (work_dir / "prometheus.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > until_s:
                raise
            time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
