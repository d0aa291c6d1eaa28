"""`motet tokenize`, `motet detokenize` and `motet model`."""

from __future__ import annotations

import argparse
import sys

from motet.cli.context import Subparsers, connect, server_option
from motet.cli.output import json_line, to_plain
from motet.errors import invalid_field
from motet.inputs.conversations import ChatMessage


def add_tokenize(commands: Subparsers) -> None:
    """Declares `motet tokenize`."""
    parser = _parser(commands, "tokenize", "print the token ids of a text, as the server makes them")
    parser.add_argument("text", metavar="TEXT", nargs="+", help="the text; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="take TEXT as a user's turn in the chat template")
    parser.add_argument("--count", action="store_true", help="print how many they are instead")
    parser.add_argument("--no-special-tokens", action="store_true", help="add no special tokens")
    parser.set_defaults(run=_tokenize)


def add_detokenize(commands: Subparsers) -> None:
    """Declares `motet detokenize`."""
    parser = _parser(commands, "detokenize", "print the text of token ids")
    parser.add_argument("ids", metavar="ID", nargs="+", help="token ids; - reads them from standard input")
    parser.add_argument("--skip-special-tokens", action="store_true", help="leave special tokens out")
    parser.set_defaults(run=_detokenize)


def add_model(commands: Subparsers) -> None:
    """Declares `motet model`."""
    parser = _parser(commands, "model", "print sizes, special tokens and defaults of the model or an adapter")
    parser.set_defaults(run=_model)


def _parser(commands: Subparsers, name: str, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", parents=[server_option()]
    )
    parser.add_argument("--adapter", default="", metavar="NAME", help="adapter to use (default: the base model)")
    parser.add_argument("--json", action="store_true", help="print the whole response as one JSON line")
    return parser


def _tokenize(arguments: argparse.Namespace) -> int:
    text = sys.stdin.read() if arguments.text == ["-"] else " ".join(arguments.text)
    with connect(arguments) as client:
        found = client.model.tokenize(
            [ChatMessage("user", text)] if arguments.chat else text,
            adapter=arguments.adapter,
            add_special_tokens=False if arguments.no_special_tokens else None,
            return_tokens=arguments.json,
        )
    if arguments.json:
        print(json_line(to_plain(found)))
    elif arguments.count:
        print(len(found.token_ids))
    else:
        print(*found.token_ids)
    return 0


def _detokenize(arguments: argparse.Namespace) -> int:
    given = sys.stdin.read() if arguments.ids == ["-"] else " ".join(arguments.ids)
    parts = given.replace(",", " ").split()
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise invalid_field("ID", f"{part[:40]!r} is not a token id; give numbers from 0")
    with connect(arguments) as client:
        text = client.model.detokenize(
            [int(part) for part in parts],
            adapter=arguments.adapter,
            skip_special_tokens=arguments.skip_special_tokens,
        )
    print(json_line({"text": text}) if arguments.json else text)
    return 0


def _model(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        found = client.model.facts(arguments.adapter)
    plain = to_plain(found)
    if arguments.json:
        print(json_line(plain))
        return 0
    width = max(map(len, plain))
    for name, value in plain.items():
        print(f"{name:<{width}}  {value if isinstance(value, str | int) else json_line(value)}")
    return 0
