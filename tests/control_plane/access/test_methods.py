"""Every method of every service of every port has an entry in the one table of roles."""

from __future__ import annotations

import pytest

from control_plane.access.methods import REFLECTION_SERVICES, REQUIREMENTS, Anyone, is_open, require_allowed
from control_plane.access.principal import ANYBODY, Principal, Role, of_roles
from control_plane.api.rpc import reflection
from control_plane.errors import PermissionDenied
from control_plane.scaler.v1 import externalscaler_pb2
from tests.control_plane.api.rpc.test_callers import CLIENT_METHODS, WORKER_METHODS, methods_of


def test_the_table_has_every_method_of_every_port_and_no_other() -> None:
    scaler_methods = methods_of(externalscaler_pb2)
    assert REQUIREMENTS.keys() == CLIENT_METHODS.keys() | WORKER_METHODS.keys() | scaler_methods.keys()
    assert set(REFLECTION_SERVICES) == set(reflection.SERVICE_NAMES)


@pytest.mark.parametrize("method", REQUIREMENTS)
def test_a_principal_without_roles_may_call_what_needs_no_role(method: str) -> None:
    if isinstance(REQUIREMENTS[method], Anyone):
        require_allowed(method, Principal(name="key:x"))
    else:
        with pytest.raises(PermissionDenied, match="needs the role"):
            require_allowed(method, Principal(name="key:x"))
    require_allowed(method, ANYBODY)


def test_a_method_without_an_entry_is_refused() -> None:
    with pytest.raises(PermissionDenied, match="no role"):
        require_allowed("/motet.v1.GenerationService/Other", ANYBODY)
    assert not is_open("/motet.v1.GenerationService/Other")


def test_writing_includes_reading_and_admin_includes_everything() -> None:
    assert of_roles([Role.ADAPTERS_WRITE]) == {Role.ADAPTERS_WRITE, Role.ADAPTERS_READ}
    assert of_roles([Role.ADMIN, Role.INFER]) == set(Role)
    assert of_roles([]) == frozenset()
