"""The `motet` command. One file per group of commands; `main.py` joins them."""

import os

# gRPC reads it when it is imported, which the modules of this package do. Our own sentence says why a handshake failed.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
