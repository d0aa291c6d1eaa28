"""`make demo`: train once, start the system, register the adapters, stream one prompt through all of them."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from motet import AsyncClient, ServerStatus
from rich.console import Console

from benchmarks.demo import screen
from benchmarks.demo.recipe import ADAPTERS, recipe_hash
from benchmarks.demo.streams import Column, run_all
from benchmarks.system import ROOT, StartFailed, System

PROMPT = "The import statement"
MAX_TOKENS = 64
_HEARTBEAT_SETTLE_S = 1.5  # workers tell their counts every half second


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--prompt", default=PROMPT, help=f"what every model continues (default {PROMPT!r})")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help=f"tokens per stream (default {MAX_TOKENS})")
    parser.add_argument("--cache", type=Path, default=ROOT / ".motet" / "demo", help="where trained models are kept")
    args = parser.parse_args()
    console = Console()
    begin_s = time.monotonic()
    trained = args.cache / recipe_hash()
    try:
        if trained.exists():
            console.print(f"using the model trained earlier ({trained.name})")
        else:
            console.print(f"training a small base model and {len(ADAPTERS)} adapters; about two minutes, once")
            _train(trained)
        with tempfile.TemporaryDirectory(prefix="motet-demo-") as data_dir:
            console.print("starting Redis, a control plane and a worker")
            system = System(trained / "base", Path(data_dir))
            with system:
                system.start_worker(flags=["--arena-bytes", "64MiB", "--num-blocks", "512"])
                asyncio.run(_show(console, system.address, trained, args.prompt, args.max_tokens))
            unclean = {name: code for name, code in system.exit_codes.items() if code != 0}
    except StartFailed as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    if unclean:
        console.print(f"did not end cleanly: {unclean}")
        return 1
    console.print(f"all processes ended cleanly; {time.monotonic() - begin_s:.0f} s in all")
    return 0


def _train(out: Path) -> None:
    from benchmarks.demo.train import train_all  # torch and transformers take seconds to import

    train_all(out)


async def _show(console: Console, target: str, trained: Path, prompt: str, max_tokens: int) -> None:
    async with AsyncClient(target) as client:
        for recipe in ADAPTERS:
            adapter = await client.adapters.register(recipe.name, trained / "adapters" / recipe.name)
            version = adapter.active_version
            assert version is not None, "a registered adapter has an active version"
            kind = f"{version.kind:<7} rank {version.max_rank:<3}"
            line = f"registered {recipe.name:<16} {kind} {version.size_bytes:>9,} bytes  {version.digest[:16]}"
            console.print(line, highlight=False)
        columns = [Column("base", ""), *(Column(recipe.name, recipe.name) for recipe in ADAPTERS)]
        # One token each first: afterwards every adapter lies in the worker's arena and one step can carry all.
        await run_all(client, [Column(c.title, c.adapter) for c in columns], prompt, 1)
        before = await _settled_status(client)
        await screen.show_while(console, prompt, columns, run_all(client, columns, prompt, max_tokens))
        after = await _settled_status(client)
        console.print(screen.result_table(columns))
        _prove_sharing(console, before, after, len(columns))


async def _settled_status(client: AsyncClient) -> ServerStatus:
    await asyncio.sleep(_HEARTBEAT_SETTLE_S)
    return await client.status()


def _prove_sharing(console: Console, before: ServerStatus, after: ServerStatus, num_streams: int) -> None:
    """Say how many tokens came out of how many steps: one stream alone gets one token a step."""
    worker = after.workers[0]
    num_steps = worker.num_steps - before.workers[0].num_steps
    num_tokens = worker.num_tokens_sampled - before.workers[0].num_tokens_sampled
    console.print(
        f"{num_tokens} tokens of {num_streams} streams came out of {num_steps} steps of the model: "
        f"{num_tokens / max(num_steps, 1):.1f} tokens a step; {worker.num_adapters_loaded} adapters in its arena"
    )


if __name__ == "__main__":
    sys.exit(main())
