"""A principal: who was authenticated, and what the credential allows.

However a client proves who it is (an API key, a JWT, a certificate), the result is a Principal. What happens to a call
later depends on the Principal alone and never on the kind of credential.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

ANY_TENANT = "*"
BASE_MODEL = "@base"  # stands for the base model among the adapters of a credential; no adapter id has this form
DEFAULT_TENANT = "default"


class Role(enum.Enum):
    """What a credential allows. Names are those of the key file and of a token's claim."""

    INFER = "infer"  # generate
    ADAPTERS_READ = "adapters.read"  # get and list adapters and operations
    ADAPTERS_WRITE = "adapters.write"  # register, change, pin and delete the tenant's own adapters; includes reading
    ADMIN = "admin"  # everything, for every tenant: the operator of the server


_INCLUDED = {
    Role.ADAPTERS_WRITE: frozenset({Role.ADAPTERS_WRITE, Role.ADAPTERS_READ}),
    Role.ADMIN: frozenset(Role),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a call, and what the credential allows."""

    name: str = ""  # "key:ID", "jwt:SUBJECT" or "cert:IDENTITY"; empty: the server knows no users
    roles: frozenset[Role] = frozenset()  # with everything that they include; `of_roles` adds it
    tenants: tuple[str, ...] = ()  # it may act for these, the first one by default; ANY_TENANT: for all
    # Ids of the adapters that it may use, or shell patterns of ids, and BASE_MODEL; None: all that its tenant sees.
    adapters: tuple[str, ...] | None = None
    expires_s: float | None = None  # wall clock, seconds since 1970

    @property
    def is_authenticated(self) -> bool:
        """Whether the server knows who this is."""
        return bool(self.name)

    @property
    def is_stranger(self) -> bool:
        """Whether the server knows its users, and does not know this one."""
        return not self.name and not self.roles

    @property
    def is_admin(self) -> bool:
        return Role.ADMIN in self.roles

    @property
    def default_tenant(self) -> str:
        """The tenant of a call that names none."""
        first = self.tenants[0] if self.tenants else ANY_TENANT
        return DEFAULT_TENANT if first == ANY_TENANT else first

    def may_act_for(self, tenant: str) -> bool:
        """Whether its calls may be counted for this tenant."""
        return ANY_TENANT in self.tenants or tenant in self.tenants

    def may_use(self, adapter_id: str) -> bool:
        """Whether its credential allows this adapter; "" is the base model. Says nothing of the adapter's owner."""
        if self.adapters is None:
            return True
        if not adapter_id:  # no other pattern means it, even if it matches the text
            return BASE_MODEL in self.adapters or "*" in self.adapters
        return any(fnmatchcase(adapter_id, pattern) for pattern in self.adapters)


def of_roles(roles: Collection[Role]) -> frozenset[Role]:
    """These roles with those that they include."""
    return frozenset().union(*(_INCLUDED.get(role, frozenset({role})) for role in roles))


# Of a server without authentication: whoever reaches the port may do everything, under any tenant's name.
ANYBODY = Principal(roles=frozenset(Role), tenants=(ANY_TENANT,))
STRANGER = Principal()  # of a server with authentication: without a valid credential, for methods that need none
THE_SERVER = Principal(name="server", roles=frozenset(Role), tenants=(ANY_TENANT,))
