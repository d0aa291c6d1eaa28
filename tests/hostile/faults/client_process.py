"""A client that requests streams until it is killed: `python -m tests.hostile.faults.client_process HOST:PORT SEED`."""

from __future__ import annotations

import random
import sys
import threading

from motet import Client, MotetError

from tests.makers import make_prompt

NUM_THREADS = 6


def main() -> None:
    address, seed = sys.argv[1], int(sys.argv[2])
    has_begun = threading.Event()
    with Client(address) as client:

        def ask(number: int) -> None:
            draw = random.Random(f"{seed}/{number}")
            while True:
                try:
                    for _ in client.generate(make_prompt(draw.randrange(1 << 30), 12), max_tokens=80, ignore_eos=True):
                        has_begun.set()
                except MotetError:
                    has_begun.set()  # another fault has the server; whoever waits for us need not

        for number in range(NUM_THREADS):
            threading.Thread(target=ask, args=(number,), daemon=True).start()
        has_begun.wait()
        print("streaming", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
