"""What the control plane, the worker and the tools that start them agree on, written once.

Holds the stubs of the plan stream, the forms of ids, the packed layout of adapters, the keys of the host cache, the
table of sampling parameters, how a checkpoint is identified, and how a server process logs and says that it is ready.
Imports nothing of Motet but the stubs of the public protos, and no torch. Every other package may import it, but for
the SDK, which is installed alone.
"""

PROTOCOL = 3  # version of the plan stream that this release speaks best
OLDEST_PROTOCOL = 3  # the oldest one that it still speaks: that of the release before, once there is one


def common_protocol(lowest: int, highest: int) -> int | None:
    """The newest version that both ends speak, by the other's range; None: there is none."""
    newest = min(PROTOCOL, highest)
    return newest if newest >= max(OLDEST_PROTOCOL, lowest) else None
