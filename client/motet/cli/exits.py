"""Exit codes of the command and the one line that each error prints."""

from __future__ import annotations

import grpc

from motet.command_line import WRONG_COMMAND_LINE
from motet.errors import MotetError

OK = 0
FAILED = 1  # anything not listed here
USAGE = WRONG_COMMAND_LINE
REFUSED = 3
NOT_FOUND = 4
EXHAUSTED = 5
UNAVAILABLE = 6
DEADLINE = 7
CORRUPT = 8
INTERRUPTED = 130  # Ctrl-C, as shells count it
BROKEN_PIPE = 141  # the reader of our output left, as shells count it

_EXIT_BY_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: REFUSED,
    grpc.StatusCode.FAILED_PRECONDITION: REFUSED,
    grpc.StatusCode.ALREADY_EXISTS: REFUSED,
    grpc.StatusCode.ABORTED: REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: REFUSED,
    grpc.StatusCode.UNAUTHENTICATED: REFUSED,
    grpc.StatusCode.OUT_OF_RANGE: REFUSED,
    grpc.StatusCode.NOT_FOUND: NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE: UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: DEADLINE,
    grpc.StatusCode.DATA_LOSS: CORRUPT,
    grpc.StatusCode.CANCELLED: INTERRUPTED,
}

HELP = """\
exit codes:
  0    done
  1    failed in a way not listed here
  2    wrong command line
  3    the request was refused: bad value, wrong base model, changed meanwhile, no valid
       credential, not allowed
  4    no such adapter or version
  5    a queue, budget or limit is full; try again later
  6    the server cannot be reached or cannot respond at present
  7    the time ran out
  8    data arrived damaged
  130  cancelled
  141  the reader of the output left
"""


def exit_code_of(error: MotetError) -> int:
    """The exit code that `error` ends the command with."""
    return _EXIT_BY_CODE.get(error.code, FAILED)


def error_line(error: MotetError) -> str:
    """One line for people: message, field violations that it does not name already, what to do next."""
    parts = [" ".join(error.message.split())]
    for violation in error.field_violations:
        if violation.description not in error.message:
            parts.append(f"{violation.field}: {violation.description}")
    if error.retry_after_s is not None and "try again" not in error.message:
        parts.append(f"try again in {error.retry_after_s:g} s")
    if error.reason == "SERVER_UNREACHABLE":
        parts.append("is `motet up` running there? --server HOST:PORT or MOTET_SERVER names another server")
    if error.reason == "UNAUTHENTICATED":
        parts.append("--api-key-file FILE or MOTET_API_KEY gives the key")
    reason = f" [{error.reason}]" if error.reason else ""
    return f"motet: {'; '.join(parts)}{reason}"
