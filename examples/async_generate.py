"""Sends one prompt to the base model and to several adapters at the same time, with asyncio.

All requests share the same batches on the server, whatever their adapter.
Run: python examples/async_generate.py "Once upon a time" legal medical
"""

import asyncio
import os
import sys

from motet import AsyncClient


async def main(prompt: str, adapters: list[str]) -> None:
    async with AsyncClient(os.environ.get("MOTET_SERVER", "127.0.0.1:50051")) as client:

        async def complete(adapter: str) -> str:
            stream = client.generate(prompt, adapter=adapter, max_tokens=32)
            return "".join([chunk.text async for chunk in stream])

        names = ["", *adapters]  # "" is the base model
        for name, text in zip(names, await asyncio.gather(*map(complete, names)), strict=True):
            print(f"{name or 'base model'}: {text!r}")


asyncio.run(main(sys.argv[1], sys.argv[2:]))
