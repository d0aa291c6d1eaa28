"""What registering changed, as the message says it."""

from __future__ import annotations

from motet.v1 import adapters_pb2

from control_plane.api.wire import registered_message
from control_plane.registry.records import AdapterRecord, AdapterState, Registered
from tests.control_plane.api.fake_adapters import DIGEST, OTHER_DIGEST, adapter_record, adapter_version

OLD, NEW = adapter_version(OTHER_DIGEST, number=1), adapter_version(DIGEST, number=2)
ONE, BOTH = adapter_record("a", (OLD,), OTHER_DIGEST), adapter_record("a", (NEW, OLD), DIGEST)


def change_of(record: AdapterRecord, previous: AdapterRecord | None, *, is_repaired: bool = False) -> tuple[str, int]:
    """The change, and the number of the version that was active before (0: none)."""
    message = registered_message(Registered(record.active_digest, record, previous, is_repaired))
    assert list(message.active_version.target_modules) == list(OLD.target_modules)
    registration = message.registration
    assert not registration.previous_version.target_modules
    name = adapters_pb2.RegistrationChange.Name(registration.change).removeprefix("REGISTRATION_CHANGE_")
    return name, registration.previous_version.number


def test_every_change_has_its_name() -> None:
    assert change_of(ONE, None) == ("CREATED", 0)
    assert change_of(BOTH, ONE) == ("VERSION_ADDED", 1)
    assert change_of(adapter_record("a", (NEW, OLD), OTHER_DIGEST), BOTH) == ("VERSION_ACTIVATED", 2)
    assert change_of(BOTH, BOTH) == ("NONE", 2)


def test_version_that_could_not_be_served_is_activated_by_registering_it_again() -> None:
    broken = adapter_record("a", (OLD,), OTHER_DIGEST, state=AdapterState.FAILED, state_reason="damaged")
    assert change_of(ONE, broken) == ("VERSION_ACTIVATED", 1)


def test_repair_of_weights_is_no_change_of_the_name_and_is_reported() -> None:
    assert change_of(BOTH, BOTH, is_repaired=True) == ("VERSION_ACTIVATED", 2)


def test_record_that_could_not_be_read_is_created_anew() -> None:
    assert change_of(ONE, adapter_record("a", (), "", state=AdapterState.FAILED)) == ("CREATED", 0)
