"""What a job records of its request, and that no other module writes it."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

from control_plane.fleet.requests.jobs import Job, NotFinite
from control_plane.fleet.requests.quotas import Charge
from control_plane.fleet.requests.streams import JobStream
from control_plane.scheduler.types import Request, RequestId
from tests.ownership import written_fields

PACKAGE = Path(__file__).parents[4] / "control_plane" / "fleet"


def make_job() -> Job:
    stream = JobStream(lambda: None, lambda: None, lambda index: None)
    return Job(Request(RequestId(1), (1, 2, 3), 8), stream, Charge("default", 3, 11))


def test_a_job_counts_delivered_tokens() -> None:
    job = make_job()
    assert not job.deliver(5)
    job.count_tokens(2)
    job.note_searched(9)
    job.note_searched(4)
    assert (job.num_tokens_here, job.num_generated, job.num_searched) == (3, 3, 9)


def test_a_job_that_leaves_its_worker_keeps_its_request_unless_a_scheduler_returned_it() -> None:
    job = make_job()
    request = job.request
    job.leave_worker(None)
    assert job.request is request
    returned = Request(RequestId(1), (1, 2, 3), 8, generated_token_ids=(5,))
    job.leave_worker(returned)
    assert job.request is returned


def test_a_job_forgets_the_workers_of_logits_that_were_not_finite_with_its_next_token() -> None:
    job, worker = make_job(), NotFinite("w0", 1, gave_tokens=True)
    job.note_not_finite(worker)
    assert (job.take_not_finite(), job.take_not_finite()) == ([worker], [])


def test_only_jobs_and_deaths_write_the_fields_of_a_job() -> None:
    """Other parts of the fleet have a session, a request or a stream of their own, too."""
    owned = {field.name for field in fields(Job)} - {"session", "request", "stream", "charge"}
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in written_fields(ast.parse(path.read_text()))
        if name in owned
    }
    assert {place for place in found if not place.startswith(("requests/jobs.py", "requests/deaths.py"))} == set()
    assert "requests/deaths.py: num_losses" in found


def test_no_other_module_replaces_the_session_or_the_request_of_a_job() -> None:
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if ast.unparse(node) in ("job.session", "job.request")
    ]
    assert found == []
