"""The gateway's command: reads the command line, sets up the log, serves until a signal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import uvloop
from motet import MotetError
from motet.command_line import Parser

from contract.process_log import configure_logging, settings_line
from contract.redaction import redacted
from gateway import polling
from gateway.app import gateway_app
from gateway.config import add_arguments, environment, from_args
from gateway.http.server import bound, serve
from gateway.processes.supervisor import supervise

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until SIGTERM or SIGINT; the exit status."""
    parser = Parser(
        prog="motet gateway",
        description="Motet over HTTP: an OpenAI-compatible API, and the sampling part of the Tinker protocol.",
        allow_abbrev=False,
    )
    parser.add_version()
    try:
        add_arguments(parser, environment(sys.argv[1:] if argv is None else argv))
        config = from_args(parser.parse_args(argv))
    except ValueError as error:
        parser.refuse(str(error))
    if polling.choose():  # `motet gateway`, which has loaded gRPC
        polling.begin_again(sys.argv[1:] if argv is None else argv)
    configure_logging(config.http.log_level, log_format=config.http.log_format, process="gateway")
    logger.info("settings %s", settings_line(config, only_changed=True))
    try:
        if config.http.processes > 1:
            return supervise(config)
        uvloop.run(serve(gateway_app(config), config.http, bound(config.http)))
    except (MotetError, OSError) as error:
        # What an operator can mend needs one line; anything else is our mistake and shows its traceback.
        print(f"{parser.prog}: {redacted(str(error))}", file=sys.stderr)
        return 1
    return 0
