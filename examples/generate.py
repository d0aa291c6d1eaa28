"""Streams one completion of an adapter: the smallest useful client.

Run: python examples/generate.py legal "The party of the first part"        (MOTET_SERVER names another server)
"""

import os
import sys

from motet import Client

adapter, prompt = sys.argv[1:]
with Client(os.environ.get("MOTET_SERVER", "127.0.0.1:50051")) as client:
    for chunk in client.generate(prompt, adapter=adapter, max_tokens=64):
        print(chunk.text, end="", flush=True)
print()
