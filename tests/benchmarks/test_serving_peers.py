"""A peer runs jobs in a process of its own, which stands still between them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.serving.peer_process import Peer, PeerFailed
from benchmarks.serving.peers import WARMUP_TOKENS, serve
from benchmarks.serving.workloads import Job

FAKE = """
import json, sys
setup = json.loads(sys.stdin.readline())
print("loading", file=sys.stderr)
print(json.dumps({"mode": "fake in " + setup["dtype"]}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job["max_tokens"] == 13:
        sys.exit("thirteen")
    token_ids = [prompt[:1] * job["max_tokens"] for prompt in job["prompts"]]
    print(json.dumps({"duration_s": 0.5, "token_ids": token_ids}), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Peer:
    script = tmp_path / "fake.py"
    script.write_text(FAKE, encoding="utf-8")
    return Peer("fake", model_dir=tmp_path, dtype="float32", threads=1, adapter_dirs=[], max_model_len=8, script=script)


def test_a_peer_runs_one_job_after_the_other(fake: Peer) -> None:
    with fake as peer:
        assert peer.mode == "fake in float32"
        assert peer.run([Job((5, 6), 2, None), Job((7, 8), 2, 0)]) == (0.5, [[5, 5], [7, 7]])
        assert peer.run([Job((9, 6), 1, None)]) == (0.5, [[9]])


def test_a_peer_is_stopped_between_jobs_and_gone_at_the_end(fake: Peer) -> None:
    with fake as peer:
        process = psutil.Process(peer.pid)
        for _ in range(2):
            assert process.status() == psutil.STATUS_STOPPED
            peer.run([Job((5,), 1, None)])
    assert not process.is_running()


def test_a_peer_that_ends_is_reported_with_its_log(fake: Peer) -> None:
    with fake as peer, pytest.raises(PeerFailed, match="fake ended with status 1\nloading\nthirteen"):
        peer.run([Job((5,), 13, None)])


def test_jobs_of_several_lengths_are_refused(fake: Peer) -> None:
    with fake as peer, pytest.raises(ValueError, match="one length"):
        peer.run([Job((5,), 1, None), Job((5, 6), 1, None)])


def test_the_first_job_of_a_size_is_run_briefly_before_it_is_timed() -> None:
    requested: list[tuple[int, int]] = []

    def generate(job: dict[str, Any], num_tokens: int) -> list[list[int]]:
        requested.append((len(job["prompts"]), num_tokens))
        return [[0] * num_tokens for _ in job["prompts"]]

    jobs = [{"prompts": [[1, 2]] * count, "adapters": [None] * count, "max_tokens": 9} for count in (3, 3, 1)]
    results = io.StringIO()
    serve(generate, map(json.dumps, jobs), results)
    assert requested == [(3, WARMUP_TOKENS), (3, 9), (3, 9), (1, WARMUP_TOKENS), (1, 9)]
    assert [len(json.loads(line)["token_ids"]) for line in results.getvalue().splitlines()] == [3, 3, 1]
