"""The `motet` command: joins the groups of commands and turns every error into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from motet.cli import adapters, audit, convert, exits, generate, keys, server_parts, status, up
from motet.cli.context import Subparsers, server_option
from motet.cli.live import top
from motet.cli.local import completion, config, doctor, store
from motet.command_line import Parser
from motet.errors import MotetError
from motet.model import commands as model
from motet.pooling import commands as pooling
from motet.workers import commands as workers

_CLIENT_COMMANDS: dict[str, Callable[[Subparsers], None]] = {
    "generate": generate.add_parser,
    "embed": pooling.add_embed,
    "classify": pooling.add_classify,
    "tokenize": model.add_tokenize,
    "detokenize": model.add_detokenize,
    "model": model.add_model,
    "adapters": adapters.add_parser,
    "status": status.add_parser,
    "top": top.add_parser,
    "workers": workers.add_parser,
    "audit": audit.add_parser,
    "keys": keys.add_parser,
    "convert": convert.add_parser,
    "config": config.add_parser,
    "doctor": doctor.add_parser,
    "store": store.add_parser,
}
# Their command lines belong to the server parts, so they are handed over unread.
_HANDED_OVER: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "up": ("run control plane, worker and, with --http, the gateway on this machine", up.run_up),
    "control-plane": ("run the control plane alone", server_parts.run_control_plane),
    "worker": ("run one worker alone", server_parts.run_worker),
    "gateway": ("run the HTTP gateway", server_parts.run_gateway),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except MotetError as error:
        print(exits.error_line(error), file=sys.stderr)
        return exits.exit_code_of(error)
    except server_parts.ServerPartMissing as error:
        print(f"motet: {error}", file=sys.stderr)
        return exits.FAILED
    except UnicodeError as error:
        print(f"motet: the text given is not valid UTF-8, or this terminal cannot show it: {error}", file=sys.stderr)
        return exits.REFUSED
    except KeyboardInterrupt:
        print("motet: cancelled", file=sys.stderr)
        return exits.INTERRUPTED
    except BrokenPipeError:
        # Python would complain once more when it flushes standard output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.BROKEN_PIPE


def _run(argv: list[str]) -> int:
    if argv and argv[0] in _HANDED_OVER:
        return _HANDED_OVER[argv[0]][1](argv[1:])
    parser = _parser()
    if not argv:
        parser.error(f"no command; give one of {', '.join([*_CLIENT_COMMANDS, *_HANDED_OVER])}")
    arguments = parser.parse_args(argv)
    code: int = arguments.run(arguments)
    return code


def _parser(*, is_whole: bool = False) -> Parser:
    """Every command; the flags of server parts, which are read by those, only for a whole one."""
    parser = Parser(
        prog="motet",
        description="Serve one language model with many LoRA adapters, and use it.",
        epilog=exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[server_option(is_top=True)],
    )
    parser.add_version()
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_parser in _CLIENT_COMMANDS.values():
        add_parser(commands)
    completion.add_parser(commands, lambda: _parser(is_whole=True))
    for name, (help_text, _) in _HANDED_OVER.items():
        handed_over: Parser = commands.add_parser(name, help=help_text, add_help=is_whole)
        if is_whole:
            completion.declare_server_part(handed_over, name)
    return parser


if __name__ == "__main__":
    sys.exit(main())
