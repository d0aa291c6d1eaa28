"""`motet generate`: one request, streamed to the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from motet.cli import exits
from motet.cli.context import Subparsers, connect, seconds, server_option
from motet.cli.output import json_line, to_plain
from motet.client import GenerationStream
from motet.errors import invalid_field
from motet.requests import GenerateOptions, Prompt
from motet.types import ChatMessage, Chunk


def add_parser(commands: Subparsers) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "generate", help="stream a completion", description="Stream a completion.", parents=[server_option()]
    )
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from standard input")
    parser.add_argument("--adapter", default="", metavar="NAME", help="adapter to use (default: the base model)")
    parser.add_argument("--adapter-digest", default="", metavar="HEX", help="one version of it (default: the active)")
    parser.add_argument("--json", action="store_true", help="print one JSON line per event")
    parser.add_argument("--stats", action="store_true", help="print token counts and times to standard error")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--chat", action="store_true", help="take PROMPT as a user's turn in the chat template")
    what.add_argument("--token-ids", action="store_true", help="take PROMPT as token ids, apart by spaces or commas")
    parser.add_argument("--system", metavar="TEXT", help="system message before PROMPT; implies --chat")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate, a count (default: 128)")
    sampling.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy, no unit, at most 100 (default: 0)"
    )
    sampling.add_argument(
        "--top-k", type=int, metavar="K", help="keep the K most likely tokens, a count (default: all)"
    )
    sampling.add_argument("--top-p", type=float, metavar="P", help="nucleus, no unit, in (0, 1] (default: 1)")
    sampling.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens (default: drawn)")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated (default: none)"
    )
    sampling.add_argument(
        "--stop-token-id",
        action="append",
        default=[],
        type=int,
        metavar="ID",
        help="end after it; may be repeated (default: none)",
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    parser.add_argument(
        "--cache-salt", default="", metavar="TEXT", help="prefix-cache partition, at most 128 bytes (default: none)"
    )
    parser.add_argument(
        "--request-id",
        default="",
        metavar="TEXT",
        help="label of the request in the server's log, at most 128 bytes (default: the server makes one)",
    )
    parser.add_argument("--timeout-s", type=seconds, default=600.0, metavar="S", help="seconds in all (default: 600)")
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    prompt = _prompt(arguments)
    options: GenerateOptions = {
        "adapter": arguments.adapter,
        "adapter_digest": arguments.adapter_digest,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
        "stop": arguments.stop,
        "stop_token_ids": arguments.stop_token_id,
        "ignore_eos": True if arguments.ignore_eos else None,
        "cache_salt": arguments.cache_salt,
        "request_id": arguments.request_id,
    }
    # Leaving the `with`, by Ctrl-C too, cancels the request.
    with connect(arguments) as client, client.generate(prompt, timeout_s=arguments.timeout_s, **options) as stream:
        if arguments.json:
            _print_events(stream)
        else:
            _print_text(stream)
        if arguments.stats:
            print(_summary(stream), file=sys.stderr)
    return exits.OK


def _prompt(arguments: argparse.Namespace) -> Prompt:
    text: str = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.token_ids:
        if arguments.system is not None:
            raise invalid_field("--system", "needs a text prompt; leave --token-ids out")
        try:
            return [int(part) for part in text.replace(",", " ").split()]
        except ValueError as error:
            raise invalid_field("PROMPT", f"holds something that is no token id: {error}") from error
    if arguments.chat or arguments.system is not None:
        system = [] if arguments.system is None else [ChatMessage("system", arguments.system)]
        return [*system, ChatMessage("user", text)]
    return text


def _print_text(stream: GenerationStream) -> None:
    ends_line = False
    for chunk in stream:
        if chunk.text:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            ends_line = chunk.text.endswith("\n")
    if not ends_line:
        print(flush=True)


def _print_events(stream: GenerationStream) -> None:
    is_started = False
    for chunk in stream:
        if not is_started:
            is_started = True
            print(json_line({"event": "started", **to_plain(stream.started)}), flush=True)
        if chunk.finish_reason is None:
            print(json_line({"event": "delta", **_delta(chunk)}), flush=True)
    print(json_line({"event": "finished", **to_plain(stream.finished)}), flush=True)


def _delta(chunk: Chunk) -> dict[str, Any]:
    return {
        "index": chunk.index,
        "token_offset": chunk.token_offset,
        "token_ids": list(chunk.token_ids),
        "text": chunk.text,
    }


def _summary(stream: GenerationStream) -> str:
    result = stream.result()
    usage, timings = result.finished.usage, result.finished.timings
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated, "
        f"ended by {result.finished.finish_reason}, seed {result.finished.seed}, "
        f"first token after {timings.time_to_first_token_s * 1000:.0f} ms, {timings.total_time_s:.2f} s in all"
    )
