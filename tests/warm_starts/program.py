"""What the tests start."""

import atexit
import os
import sys
import threading

if __name__ == "__main__":
    print("ready", os.environ["SAID"], os.getpid(), sys.argv[1:], "decimal" in sys.modules, flush=True)
    print("a line of", os.environ["SAID"], file=sys.stderr)
    atexit.register(lambda: print("at exit", file=sys.stderr))
    match sys.argv[1]:
        case "exit":
            sys.exit(int(sys.argv[2]))
        case "wait":
            threading.Event().wait()
        case "fail":
            raise ArithmeticError("no such thing")
