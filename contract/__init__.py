"""What the control plane, the worker and the tools that start them agree on, written once.

Holds the stubs of the plan stream, the forms of ids, the packed layout of adapters, the keys of the host cache, the
table of sampling parameters, how a checkpoint is identified, and how a server process logs and says that it is ready.
Imports nothing of Motet but the stubs of the public protos, and no torch. Every other package may import it, but for
the SDK, which is installed alone.
"""

PROTOCOL = 3  # version of the plan stream; control plane and worker must have the same
