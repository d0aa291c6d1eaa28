"""Draws the demo: live columns on a terminal, plain lines anywhere else; and the tables at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from benchmarks.demo.streams import Column

_REFRESH_S = 0.1
_STYLES = ("white", "yellow", "cyan", "green", "magenta", "blue")


async def show_while(console: Console, prompt: str, columns: list[Column], work: Awaitable[None]) -> None:
    """Show `columns` while `work` fills them."""
    if not console.is_terminal:
        console.print(f"prompt: {prompt!r}, to {len(columns)} models at once", soft_wrap=True, markup=False)
        await work
        for column in columns:
            console.print(f"\n--- {column.title} {_figures(column)}", soft_wrap=True, markup=False)
            console.print(prompt + column.text, soft_wrap=True, markup=False, highlight=False)
        return
    with Live(_panels(console, prompt, columns), console=console, auto_refresh=False) as live:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait([task], timeout=_REFRESH_S)
            live.update(_panels(console, prompt, columns), refresh=True)
        await task


def result_table(columns: list[Column]) -> Table:
    table = Table(title="one batch, every stream its own weights")
    for heading in ("model", "tokens", "tokens/s", "first token", "adapter digest"):
        table.add_column(heading, justify="left" if heading in ("model", "adapter digest") else "right")
    for column in columns:
        ttft = f"{1000 * column.ttft_s:.0f} ms" if column.ttft_s is not None else "-"
        digest = column.digest[:16] or "(base model)"
        table.add_row(column.title, str(column.num_tokens), f"{column.tokens_per_s:.0f}", ttft, digest)
    return table


def _panels(console: Console, prompt: str, columns: list[Column]) -> RenderableType:
    per_row = max(min(len(columns), console.width // 38), 1)
    width = console.width // per_row
    num_rows = -(-len(columns) // per_row)
    height = max((console.height - 2) // num_rows, 6)
    panels = []
    for column, style in zip(columns, _STYLES * len(columns), strict=False):
        body = Text(prompt, style="bold") + Text(column.text, style=style)
        visible = body.wrap(console, width - 4)[-(height - 2) :]
        panel = Panel(
            Text("\n").join(visible), title=column.title, subtitle=_figures(column), width=width, height=height
        )
        panels.append(panel)
    return Columns(panels, padding=0, expand=False)


def _figures(column: Column) -> str:
    if column.ttft_s is None:
        return "waiting"
    return f"{column.num_tokens} tokens, {column.tokens_per_s:.0f}/s, first after {1000 * column.ttft_s:.0f} ms"
