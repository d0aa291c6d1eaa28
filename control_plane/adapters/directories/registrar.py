"""Registers adapters from directories that the operator names, as the tenant that the operator says."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from contract.process_log import shown
from control_plane.access.principal import DEFAULT_TENANT, Principal, Role, of_roles
from control_plane.access.visibility import Visibility
from control_plane.adapters.life_cycle import AdapterLifeCycle, Registration
from control_plane.adapters.sources.adapter_directory import find_files
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import Caller, acting_as
from control_plane.errors import Exhausted, MotetError, Unavailable
from control_plane.registry.ownership_change import NO_CHANGE, OwnershipChange
from control_plane.registry.records import Registered
from control_plane.registry.registry import Registry
from control_plane.store_calls import StoreCalls

logger = logging.getLogger(__name__)


class AdapterNotRegistered(ValueError):
    """An adapter that the server cannot start without; names the flag, the adapter and the reason."""


class DirectoryRegistrar:
    """Makes versions of what lies in directories. Used from one event loop."""

    def __init__(
        self,
        registry: Registry,
        life_cycle: AdapterLifeCycle,
        audit: AuditLog,
        calls: StoreCalls,
        *,
        owner: str | None,
    ) -> None:
        """`owner`: the tenant that new names are private to; None: they are public. `calls` look at directories."""
        self._registry = registry
        self._life_cycle = life_cycle
        self._audit = audit
        self.calls = calls
        tenant = owner or DEFAULT_TENANT
        # No admin: names of other tenants stay as they are.
        roles = of_roles({Role.ADAPTERS_WRITE})
        self._caller = Caller(tenant=tenant, principal=Principal(name="server", roles=roles, tenants=(tenant,)))
        self._of_new = OwnershipChange(visibility=Visibility.PUBLIC if owner is None else Visibility.PRIVATE)

    async def register_all(self, named: Sequence[tuple[str, Path]]) -> None:
        """Register each, by name, unless its bytes are a version of the name.

        Raises AdapterNotRegistered, or Unavailable and Exhausted where the same may succeed later.
        """
        for adapter_id, directory in named:
            described = f"directory {str(directory)!r}"
            try:
                files = await self.calls.read(partial(find_files, directory, described, below=None))
                await self.register(adapter_id, files, source=str(directory), keeps_known=True)
            except (Unavailable, Exhausted):
                raise
            except MotetError as error:
                raise AdapterNotRegistered(f"--adapter: {adapter_id}: {error}") from error

    async def register(self, adapter_id: str, files: Mapping[str, Path], *, source: str, keeps_known: bool) -> None:
        """Make the files the active version of a name. Raises MotetError.

        `keeps_known`: bytes that are a version of the name already change nothing, so that a start takes back no
        activation or rollback.
        """
        with acting_as(self._caller):
            record = self._registry.find(adapter_id)
            ownership = self._of_new if record is None else NO_CHANGE
            registration = Registration(adapter_id, ownership=ownership, source=source)
            if keeps_known and record is not None:
                only_checked = replace(registration, validate_only=True)
                checked = await self._life_cycle.register(only_checked, files, may_change=True)
                if any(version.digest == checked.digest for version in record.versions):
                    logger.info("directory has a known version adapter_id=%s digest=%s", adapter_id, checked.digest)
                    return
            async with self._audit.change(actions.CREATE, f"adapters/{adapter_id}") as change:
                registered: Registered = await self._life_cycle.register(registration, files, may_change=True)
                change.digest = registered.digest
        logger.info(
            "adapter registered from directory adapter_id=%s digest=%s source=%s",
            adapter_id,
            registered.digest,
            source,
            extra=shown(f"adapter {adapter_id} registered from {source}"),
        )
