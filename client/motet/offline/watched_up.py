"""`motet up` as the process of an LLM: it also stops when standard input ends, that is, when its parent is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading

from motet.cli.main import main


def stop_at_end_of(file: int) -> None:
    """Read a file descriptor to its end, then ask this process to stop as Ctrl-C would."""
    while os.read(file, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=stop_at_end_of, args=(0,), daemon=True).start()
    sys.exit(main(["up", *sys.argv[1:]]))
