"""What most tests of the fleet stand on."""

from __future__ import annotations

import pytest

from tests.fakes.fleet_rig import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
