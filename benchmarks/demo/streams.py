"""The demo's clients: the same prompt to base and every adapter at the same moment, measured while it arrives."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from motet import AsyncClient


@dataclass
class Column:
    """One stream as it stands; filled by `run`, read by whoever draws."""

    title: str
    adapter: str  # empty: the base model
    text: str = ""
    num_tokens: int = 0
    digest: str = ""
    ttft_s: float | None = None  # from the call to the first token
    total_s: float | None = None  # from the call to the end
    first_token_s: float = 0.0  # time.monotonic()

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token; 0 before the second."""
        if self.ttft_s is None or self.num_tokens < 2:
            return 0.0
        last_s = time.monotonic() if self.total_s is None else self.first_token_s - self.ttft_s + self.total_s
        return (self.num_tokens - 1) / max(last_s - self.first_token_s, 1e-6)

    async def run(self, client: AsyncClient, prompt: str, max_tokens: int) -> None:
        """Stream the completion into this column."""
        begin_s = time.monotonic()
        stream = client.generate(prompt, adapter=self.adapter, max_tokens=max_tokens, ignore_eos=True)
        async for chunk in stream:
            now_s = time.monotonic()
            if self.ttft_s is None and chunk.token_ids:
                self.ttft_s = now_s - begin_s
                self.first_token_s = now_s
            self.text += chunk.text
            self.num_tokens += len(chunk.token_ids)
            self.digest = chunk.adapter_digest
        self.total_s = time.monotonic() - begin_s


async def run_all(client: AsyncClient, columns: list[Column], prompt: str, max_tokens: int) -> None:
    """Run every column at once; raises the first error and ends the others."""
    async with asyncio.TaskGroup() as group:
        for column in columns:
            group.create_task(column.run(client, prompt, max_tokens))
