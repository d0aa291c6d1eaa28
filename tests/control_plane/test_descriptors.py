"""The limit of open files is raised where it may be, and a start without room for connections is refused."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from control_plane.api.rpc.listeners import WORKER_CONNECTIONS
from control_plane.config import DEFAULT_MAX_CONNECTIONS, ConfigError
from control_plane.descriptors import LEAST_CONNECTIONS, OTHER_FILES, plan

RESERVED = WORKER_CONNECTIONS + OTHER_FILES


def test_soft_limit_is_raised_as_far_as_the_connections_need_it() -> None:
    room = plan(None, soft=1024, hard=100_000)
    assert (room.num_files, room.max_connections) == (RESERVED + DEFAULT_MAX_CONNECTIONS, DEFAULT_MAX_CONNECTIONS)
    assert plan(10, soft=256, hard=100_000).num_files == RESERVED + 10


def test_higher_soft_limit_stays() -> None:
    assert plan(10, soft=50_000, hard=100_000).num_files == 50_000
    assert plan(None, soft=resource.RLIM_INFINITY, hard=resource.RLIM_INFINITY).max_connections == 4096


def test_left_out_the_connections_are_what_the_hard_limit_leaves() -> None:
    assert plan(None, soft=256, hard=1024).max_connections == 1024 - RESERVED


def test_connections_that_were_requested_and_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-connections: 500 .* limit of 1268 .* may have 1024: raise .* lower"):
        plan(500, soft=256, hard=1024)
    assert plan(256, soft=256, hard=1024).max_connections == 256


def test_start_is_refused_where_almost_no_connection_fits() -> None:
    with pytest.raises(ConfigError, match=rf"{LEAST_CONNECTIONS} connections of clients need .*\(ulimit -Hn"):
        plan(None, soft=RESERVED, hard=RESERVED + LEAST_CONNECTIONS - 1)


def test_the_process_gets_the_limit_that_was_planned() -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 2000))
from control_plane.descriptors import make_room
assert make_room(None) == 2000 - 768, make_room(None)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2000, 2000)
"""
    assert RESERVED == 768
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
