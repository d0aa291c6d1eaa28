"""What authentication and the audit log cost the control plane: client_streams with and without.

`python -m benchmarks.control_plane.access_cost` runs two control planes, one with API keys and an audit log, and gives
them the same load in turn. Prints one JSON object, and exits with 1 where a limit is missed. The machine may be busy:
what counts is the CPU time of the control plane's process, and of that the median ratio of two rounds that follow each
other. Two processes of one command differ by several percent, so the pair is started anew `--pairs` times, and the
result is the geometric mean over the pairs with its 95% confidence interval. Both processes of a pair have the same
hash seed and no random addresses, which makes them more equal. `--keep FILE` adds the pairs to those of earlier runs,
so that a machine with other work can be borrowed for short pieces. `--null` turns nothing on in either. The key check
alone, in this process, shows what a ratio near 1 cannot. `access_switch` is more
exact: it turns both on and off in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import math
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import uvloop
from motet.uploads import AdapterUpload
from motet.v1 import adapters_pb2_grpc

from benchmarks.control_plane.client_streams import Metadata, measure
from benchmarks.serving.checkpoints import make_adapters, make_base
from benchmarks.system import ROOT, System
from control_plane.access.authentication.api_keys import ApiKeys
from control_plane.access.authenticator import Authenticator
from control_plane.api.rpc.callers import Callers

NUM_KEYS = 1000
NUM_CHECKS = 20_000  # of a key, in a round
NUM_CHECK_ROUNDS = 9
GENERATE = "/motet.v1.GenerationService/Generate"
Rounds = dict[bool, list[dict[str, float]]]  # with (True) and without
MAX_RATIO = 1.03  # of the CPU time per token
MAX_KEY_CHECK_US = 20.0
ADDR_NO_RANDOMIZE = 0x0040000  # of Linux's personality(2)
# Two-sided 95% quantiles of Student's t by degrees of freedom; beyond the last one the error is below 1%.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
T_95_BEYOND = 2.04


@dataclass(frozen=True)
class Served:
    """One control plane with a worker."""

    system: System
    process: psutil.Process
    metadata: Metadata
    adapters: list[str]

    def cpu_s(self) -> float:
        """CPU time of the process so far."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        if (tasks / str(self.process.pid) / "schedstat").exists():  # nanoseconds, where psutil counts in 10 ms
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def run(self, args: argparse.Namespace, seed: int, *, metadata: Metadata | None = None) -> dict[str, float]:
        """One round of streams. `metadata`: instead of the one with the key."""
        metadata = self.metadata if metadata is None else metadata
        cpu_s, began_s = self.cpu_s(), time.perf_counter()
        num_tokens, _ = uvloop.run(measure(self.system.address, self.adapters, args, seed, metadata))
        wall_s, cpu_s = time.perf_counter() - began_s, self.cpu_s() - cpu_s
        return {
            "tokens_per_s": num_tokens / wall_s,
            "cpu_us_per_token": cpu_s / num_tokens * 1e6,
            "cpu_us_per_request": cpu_s / args.streams * 1e6,
        }


def write_keys(path: Path) -> str:
    """A file of NUM_KEYS keys; one of them."""
    keys = [f"motet_bench{number:04}_{secrets.token_hex(32)[:43]}" for number in range(NUM_KEYS)]
    entries = [
        {
            "id": key.split("_")[1],
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "tenants": ["bench"],
            "roles": ["infer", "adapters.write"],
        }
        for key in keys
    ]
    path.write_text(json.dumps({"keys": entries}), encoding="utf-8")
    return keys[NUM_KEYS // 2]


@contextlib.contextmanager
def serving(
    work_dir: Path, args: argparse.Namespace, *, is_guarded: bool, command: Sequence[str] = ("-m", "control_plane")
) -> Iterator[Served]:
    """A control plane, with what is measured or without it, and its worker. `command` starts the control plane."""
    work_dir.mkdir()
    cache = ROOT / ".motet" / "bench"
    flags, metadata = ["--max-streams-per-connection", "4096", "--log-level", "warning"], Metadata()
    if is_guarded:
        key = write_keys(work_dir / "keys.json")
        flags += ["--api-keys", str(work_dir / "keys.json"), "--audit-log", str(work_dir / "audit.jsonl")]
        metadata = (("authorization", f"Bearer {key}"),)
    start: Any = {"control_flags": flags, "control_command": command, "environment": {"PYTHONHASHSEED": "0"}}
    with System(make_base("tiny", cache), work_dir / "system", **start) as system:
        worker_flags = ["--max-rows", str(args.streams), "--num-blocks", str(args.streams * 16)]
        system.start_worker(flags=worker_flags, command=("-m", "tests.fakes.hash_worker"))
        names = [f"bench-{number}" for number in range(args.adapters)]
        with grpc.insecure_channel(system.address) as channel:
            stub: Any = adapters_pb2_grpc.AdapterServiceStub(channel)  # type: ignore[no-untyped-call]
            for name, directory in zip(names, make_adapters("tiny", args.adapters, cache), strict=True):
                stub.UploadAdapter(AdapterUpload(name, directory).messages(), metadata=metadata)
        yield Served(system, psutil.Process(system.control_plane.pid), metadata, names)


class _Context:
    """What identifying a caller reads of gRPC's context."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = (("user-agent", "bench"), *metadata)

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"


def key_check_us(work_dir: Path) -> dict[str, float]:
    """CPU time of finding out who calls, with all that belongs to it, and without authentication; medians."""
    key = write_keys(work_dir / "check.json")
    context: Any = _Context((("authorization", f"Bearer {key}"),))
    guarded, open_to_all = Callers(Authenticator([ApiKeys(work_dir / "check.json")])), Callers()
    medians = {}
    for name, identify in (("with", guarded), ("without", open_to_all)):
        rounds = []
        for _ in range(NUM_CHECK_ROUNDS):
            began_s = time.process_time()
            for _ in range(NUM_CHECKS):
                identify(GENERATE, context)
            rounds.append((time.process_time() - began_s) / NUM_CHECKS * 1e6)
        medians[name] = statistics.median(rounds)
    return medians


def main() -> int:
    """Measure as the flags say and print JSON; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams, a count (default 256)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream (default 128)")
    parser.add_argument("--adapters", type=int, default=16, help="adapters beside the base model (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each in a pair (default 5)")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of control planes, one after the other (default 8)")
    parser.add_argument("--null", action="store_true", help="turn nothing on in either control plane")
    parser.add_argument("--keep", type=Path, help="a file of pairs: add each pair, and report on all of them")
    parser.add_argument("--time-s", type=float, default=math.inf, help="start no further pair after these seconds")
    args = parser.parse_args()
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)  # for the processes that this one starts
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        checks = key_check_us(Path(name))
        began_s, pairs = time.monotonic(), []
        for number in range(args.pairs):
            if time.monotonic() - began_s < args.time_s:
                pairs.append(_pair(Path(name) / f"{number}", args, number))
                _keep(args.keep, _ratio(pairs[-1], "cpu_us_per_token"))
    ratios = [_ratio(pair, "cpu_us_per_token") for pair in pairs]
    if args.keep is not None:
        ratios = [float(line) for line in args.keep.read_text(encoding="utf-8").split()]
    every: Rounds = {kind: [one for pair in pairs for one in pair[kind]] for kind in (False, True)}
    medians = {
        kind: {key: statistics.median(one[key] for one in every[kind]) for key in every[kind][0]} for kind in every
    }
    ratio, error = _mean(ratios)
    low, high = _interval(ratios)
    report = {
        "streams": args.streams,
        "tokens": args.tokens,
        "without": _rounded(medians[False]),
        "with": _rounded(medians[True]),
        "cpu_per_token_ratio": round(ratio, 4),
        "cpu_per_token_ratio_error": round(error, 4),
        "cpu_per_token_ratio_95": [round(low, 4), round(high, 4)],
        "throughput_ratio": round(_mean([_ratio(pair, "tokens_per_s") for pair in pairs])[0], 4),
        "caller_us": _rounded(checks),
        "key_check_us": round(checks["with"] - checks["without"], 2),
        "key_check_share": round((checks["with"] - checks["without"]) / medians[False]["cpu_us_per_request"], 5),
        "pairs": [round(one, 4) for one in ratios],
    }
    print(json.dumps(report, indent=1))
    return int(ratio > MAX_RATIO or checks["with"] > MAX_KEY_CHECK_US)


def _pair(work_dir: Path, args: argparse.Namespace, number: int) -> Rounds:
    """The rounds of two control planes that were started for this; odd pairs start the guarded one first."""
    work_dir.mkdir()
    rounds: Rounds = {False: [], True: []}
    with contextlib.ExitStack() as stack:
        planes = {
            kind: stack.enter_context(serving(work_dir / f"{kind}", args, is_guarded=kind and not args.null))
            for kind in ((False, True) if number % 2 == 0 else (True, False))
        }
        for seed in range(args.rounds + 1):
            for is_guarded in (False, True) if seed % 2 else (True, False):
                result = planes[is_guarded].run(args, seed)
                if seed > 0:  # the first ones warm up
                    rounds[is_guarded].append(result)
    return rounds


def _mean(ratios: list[float]) -> tuple[float, float]:
    """Geometric mean and the standard error of it."""
    logs = [math.log(ratio) for ratio in ratios]
    spread = statistics.stdev(logs) if len(logs) > 1 else 0.0
    mean = math.exp(statistics.fmean(logs))
    return mean, mean * spread / math.sqrt(len(logs))


def _interval(ratios: list[float]) -> tuple[float, float]:
    """The 95% confidence interval of the geometric mean; without limits for a single pair."""
    if len(ratios) < 2:
        return 0.0, math.inf
    mean, error = _mean(ratios)
    num_free = len(ratios) - 1
    quantile = T_95[num_free - 1] if num_free <= len(T_95) else T_95_BEYOND
    width = quantile * error / mean
    return mean * math.exp(-width), mean * math.exp(width)


def _keep(path: Path | None, ratio: float) -> None:
    """Add a pair to the file that outlives this run, if there is one."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{ratio:.6f}\n")


def _ratio(rounds: Rounds, key: str) -> float:
    """With over without: the median over pairs of rounds."""
    pairs = zip(rounds[True], rounds[False], strict=True)
    return statistics.median(guarded[key] / without[key] for guarded, without in pairs)


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 2) for name, number in numbers.items()}


if __name__ == "__main__":
    sys.exit(main())
