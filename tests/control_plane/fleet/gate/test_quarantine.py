"""How long a worker stays out, by a clock that the test moves."""

from __future__ import annotations

import itertools

import pytest

from control_plane.errors import WorkerQuarantined
from control_plane.fleet.gate.quarantine import FORGOTTEN_S, SOUND_S, SOUND_STEPS, Quarantine
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.workers.endings import EndCause
from tests.fakes.fleet_rig import FakeClock


class Rig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.quarantine = Quarantine(FleetSettings(quarantine_s=1.0, max_quarantine_s=300.0), self.clock)
        self._epochs = itertools.count(1)
        self.epoch = 0

    def end(self, cause: EndCause, *, num_steps: int = 0, lasted_s: float = 0.0) -> None:
        """A session of the worker ends so."""
        self.epoch = next(self._epochs)
        self.quarantine.note_end("w0", self.epoch, cause, "step 3 raised", num_steps=num_steps, lasted_s=lasted_s)

    def pause_s(self) -> float:
        """How long the worker is refused from now on; it may attach after that."""
        try:
            self.quarantine.check("w0")
        except WorkerQuarantined as error:
            return error.retry_after_s
        return 0.0


@pytest.mark.parametrize("cause", [EndCause.FAULT, EndCause.GARBAGE, EndCause.HUNG_STEP, EndCause.SICK])
def test_the_pauses_of_a_worker_whose_sessions_end_by_faults_double(cause: EndCause) -> None:
    rig = Rig()
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0):
        rig.end(cause)
        assert rig.pause_s() == pause_s
        rig.clock.advance(pause_s)
        assert rig.pause_s() == 0.0


def test_a_refused_attach_shortens_no_pause() -> None:
    rig = Rig()
    rig.end(EndCause.FAULT)
    for _ in range(2):
        with pytest.raises(WorkerQuarantined, match=r"w0 may attach in 1\.0 s.*1 of its sessions.*step 3 raised"):
            rig.quarantine.check("w0")
    rig.clock.advance(0.5)
    assert rig.pause_s() == 0.5
    rig.quarantine.check("w1")


def test_a_process_that_dies_is_let_in_twice_at_once() -> None:
    rig = Rig()
    pauses = []
    for _ in range(5):
        rig.end(EndCause.LOST)
        pauses.append(rig.pause_s())
        rig.clock.advance(300.0)
    assert pauses == [0.0, 0.0, 1.0, 2.0, 4.0]


def test_a_process_that_outlived_the_loss_of_its_stream_did_not_die() -> None:
    rig = Rig()
    for _ in range(10):
        rig.end(EndCause.LOST)
        rig.quarantine.outlived("w0", rig.epoch)
        assert rig.pause_s() == 0.0
    rig.end(EndCause.FAULT)
    rig.quarantine.outlived("w0", rig.epoch)  # it lives, and has said itself that it failed
    assert rig.pause_s() == 1.0


@pytest.mark.parametrize("cause", [EndCause.LEFT, EndCause.LOST, EndCause.FAULT])
def test_sound_work_makes_what_was_before_forgotten(cause: EndCause) -> None:
    rig = Rig()
    for _ in range(4):
        rig.end(EndCause.FAULT)
    rig.end(EndCause.LEFT, num_steps=SOUND_STEPS - 1)
    assert rig.pause_s() == 8.0
    rig.end(cause, num_steps=SOUND_STEPS)
    assert rig.pause_s() == (1.0 if cause is EndCause.FAULT else 0.0)


def test_steps_are_no_proof_where_the_logits_were_in_doubt_but_time_is() -> None:
    rig = Rig()
    rig.end(EndCause.SICK, num_steps=10 * SOUND_STEPS)
    rig.end(EndCause.LEFT, num_steps=10 * SOUND_STEPS)
    rig.end(EndCause.SICK, num_steps=10 * SOUND_STEPS)
    assert rig.pause_s() == 2.0
    rig.end(EndCause.SICK, lasted_s=SOUND_S)
    assert rig.pause_s() == 1.0


def test_what_is_held_against_a_worker_that_stays_away_is_forgotten_in_the_end() -> None:
    rig = Rig()
    for _ in range(3):
        rig.end(EndCause.FAULT)
    rig.clock.advance(FORGOTTEN_S)
    rig.quarantine.note_end("w1", 99, EndCause.FAULT, "", num_steps=0, lasted_s=0.0)
    rig.end(EndCause.FAULT)
    assert rig.pause_s() == 8.0
    rig.clock.advance(8.0 + FORGOTTEN_S)
    rig.quarantine.note_end("w1", 99, EndCause.FAULT, "", num_steps=0, lasted_s=0.0)
    rig.end(EndCause.FAULT)
    assert rig.pause_s() == 1.0


def test_ends_that_others_are_the_reason_of_are_forgiven() -> None:
    rig = Rig()
    rig.end(EndCause.FAULT)
    epochs = {rig.epoch}
    rig.end(EndCause.FAULT)
    rig.quarantine.discount(epochs)
    assert rig.pause_s() == 0.0
    rig.end(EndCause.FAULT)
    assert rig.pause_s() == 2.0
    for cause in (EndCause.LEFT, EndCause.CLOSED, EndCause.INTERNAL_ERROR):
        rig.clock.advance(300.0)
        rig.end(cause)
        assert rig.pause_s() == 0.0
