"""Programs: ops in their order, in any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.linear import native, reference, to_panels
from kernels.native import Program, Step, clock_ns, recording, run_one, set_num_threads
from tests.kernels.tolerances import assert_close


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_op_reads_what_the_op_before_it_wrote(num_threads: int, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: set_num_threads(torch.get_num_threads()))
    set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(64, 64, generator=generator) / 8 for _ in range(12)]
    panels = [to_panels(weight) for weight in weights]
    buffers = [torch.zeros(40, 64) for _ in range(13)]
    program = Program()
    for index, packed in enumerate(panels):
        program.add("linear", native.problem(buffers[index], packed, None, buffers[index + 1]))
    for num_tokens in (1, 40, 7):
        x = torch.randn(num_tokens, 64, generator=generator)
        buffers[0][:num_tokens] = x
        before = [buffer[num_tokens:].clone() for buffer in buffers]
        program.run(Step(num_tokens=num_tokens))
        for index, weight in enumerate(weights):
            assert_close(buffers[index + 1][:num_tokens], reference.linear(buffers[index][:num_tokens], weight, None))
        assert all(torch.equal(buffer[num_tokens:], old) for buffer, old in zip(buffers, before, strict=True))


def test_times_rise_from_op_to_op() -> None:
    weight = to_panels(torch.eye(32))
    x, y = torch.ones(3, 32), torch.zeros(3, 32)
    program = Program()
    program.add("linear", native.problem(x, weight, None, y), is_open=True)
    program.add("linear", native.problem(y, weight, None, x))
    times = np.zeros((2, 2), dtype=np.int64)
    program.run(Step(num_tokens=3), times)
    assert program.names == ["linear", "linear"]
    assert (np.diff(times.reshape(-1)) >= 0).all()
    assert times[0, 0] > 0


def test_no_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        set_num_threads(0)


def test_a_recording_has_the_runs_of_its_block_alone() -> None:
    weight = to_panels(torch.eye(32))
    x, y = torch.ones(3, 32), torch.zeros(3, 32)
    program = Program()
    program.add("linear", native.problem(x, weight, None, y))
    program.add("linear", native.problem(y, weight, None, x))
    program.run(Step(num_tokens=3))
    with recording() as runs:
        began_ns = clock_ns()
        program.run(Step(num_tokens=3))
        program.run(Step(num_tokens=1))
    program.run(Step(num_tokens=3))
    assert [run.names for run in runs] == [("linear", "linear")] * 2
    for run in runs:
        moments = [began_ns, run.began_ns, *run.times.reshape(-1).tolist(), clock_ns()]
        assert moments == sorted(moments)


def test_an_op_of_one_task_that_is_run_alone_is_timed() -> None:
    x, y, panels = torch.ones(1, 4), torch.zeros(1, 4), to_panels(torch.eye(4))
    with recording() as runs:
        run_one("linear", native.problem(x, panels, None, y), Step(num_tokens=1))
    assert torch.equal(y, x)
    assert runs[0].began_ns <= runs[0].times[0, 0] <= runs[0].times[0, 1] <= clock_ns()


def test_a_recording_inside_of_another_is_refused_and_the_outer_one_goes_on() -> None:
    x, y, panels = torch.ones(1, 4), torch.zeros(1, 4), to_panels(torch.eye(4))
    with recording() as runs:
        with pytest.raises(RuntimeError, match="recorded already"), recording():
            pass
        run_one("linear", native.problem(x, panels, None, y), Step(num_tokens=1))
    assert len(runs) == 1


def test_a_program_without_ops_does_nothing() -> None:
    Program().run(Step(num_tokens=1))


def test_many_short_runs_in_turn_keep_the_order_of_their_ops(request: pytest.FixtureRequest) -> None:
    """Of different numbers of ops and tasks, so that a thread that is late meets another run's stages."""
    request.addfinalizer(lambda: set_num_threads(torch.get_num_threads()))
    set_num_threads(3)
    panels = to_panels(torch.eye(96))
    buffers = [torch.zeros(20, 96) for _ in range(9)]
    programs = []
    for num_ops in (1, 8, 2, 5):
        program = Program()
        for index in range(num_ops):
            program.add("linear", native.problem(buffers[index], panels, None, buffers[index + 1]))
        programs.append((num_ops, program))
    for turn in range(400):
        num_ops, program = programs[turn % len(programs)]
        num_tokens = 1 + turn % 20
        buffers[0][:num_tokens] = float(turn)
        program.run(Step(num_tokens=num_tokens))
        assert (buffers[num_ops][:num_tokens] == turn).all()
