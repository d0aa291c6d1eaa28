"""`motet adapters verify`, and `--verify` of `motet adapters add`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from motet.cli import exits
from motet.cli.context import connect
from motet.cli.digests import VERSION_HELP, full_digest, named
from motet.cli.output import json_line
from motet.client import Client
from motet.errors import MotetError, invalid_field
from motet.types import Adapter, AdapterCanary, AdapterVersion, VersionRollout

_TOKEN_ID = re.compile(r"[0-9]{1,9}")


def add_action(action: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Declares the action."""
    verify = action("verify", "compare what is served of a version with merged float32 weights")
    verify.add_argument("name", metavar="NAME")
    verify.add_argument("--version", metavar="VERSION", help=f"instead of the active one: {VERSION_HELP}")
    verify.add_argument(
        "--prompts", type=Path, metavar="FILE", help="token ids, one prompt a line, beside those that the server draws"
    )
    verify.set_defaults(run=_verify)


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option of `motet adapters add`."""
    parser.add_argument(
        "--verify",
        action="store_true",
        help="make the version active only if it is served as merged float32 weights, also the first one of a name",
    )


def held_back(rollout: VersionRollout, arguments: argparse.Namespace) -> VersionRollout:
    """The rollout of a version that has to be verified first: no request gets it by a canary or a label either."""
    return replace(rollout, hold=True, canary_per_mille=0, version_labels=()) if arguments.verify else rollout


def finish_adding(client: Client, adapter: Adapter, rollout: VersionRollout, arguments: argparse.Namespace) -> int:
    """Verify the version that was registered; if it passed, roll it out as the options say."""
    registered = adapter.registration.version if adapter.registration is not None else None
    assert registered is not None, "a server that takes a rollout says which version it registered"
    is_staged = adapter.active_version is not None and (rollout.keep_active or rollout.canary_per_mille > 0)
    try:
        version = client.adapters.verify(adapter.id, registered.digest, activate=not is_staged)
    except MotetError:
        held = f"{adapter.id} {named(registered)} is registered and not active"
        again = f"motet adapters verify {adapter.id} --version @{registered.number}"
        print(f"motet: {held}, since it was not verified; verify it again: {again}", file=sys.stderr)
        raise
    if _passed(version):
        for label in rollout.version_labels:
            client.adapters.set_label(adapter.id, label, version.digest)
        if rollout.canary_per_mille and is_staged:
            client.adapters.set_canary(adapter.id, AdapterCanary(version.digest, rollout.canary_per_mille))
    adapter = client.adapters.get(adapter.id)
    print(json_line(version) if arguments.json else f"{_line(adapter.id, version)}; {_where(adapter, version)}")
    return exits.OK if _passed(version) else exits.FAILED


def word(version: AdapterVersion) -> str:
    """For a column."""
    found = version.verification
    return "" if found is None else f"{'passed' if found.passed else 'FAILED'} {found.largest_error:.2g}"


def _verify(arguments: argparse.Namespace) -> int:
    prompts = [] if arguments.prompts is None else _prompts(arguments.prompts)
    with connect(arguments) as client:
        digest = full_digest(client, arguments.name, arguments.version, field="--version") if arguments.version else ""
        version = client.adapters.verify(arguments.name, digest, prompts=prompts)
    print(json_line(version) if arguments.json else _line(arguments.name, version))
    return exits.OK if _passed(version) else exits.FAILED


def _prompts(path: Path) -> list[list[int]]:
    """Token ids of each line that has any, with or without commas and brackets. Raises InvalidArgument."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise invalid_field("--prompts", f"{path} cannot be read: {reason}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        words = line.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
        if not all(_TOKEN_ID.fullmatch(word) for word in words):
            raise invalid_field(
                "--prompts", f"line {number} of {path} is {line[:64]!r}; write token ids alone, such as 5 17 2"
            )
        prompts.append([int(word) for word in words])
    return [prompt for prompt in prompts if prompt]


def _passed(version: AdapterVersion) -> bool:
    return version.verification is not None and version.verification.passed


def _is_active(adapter: Adapter, version: AdapterVersion) -> bool:
    return adapter.active_version is not None and adapter.active_version.digest == version.digest


def _line(name: str, version: AdapterVersion) -> str:
    found = version.verification
    assert found is not None, "a verification that ended is part of the version"
    words = [
        f"{'passed' if found.passed else 'FAILED'}: {name} version {version.number}",
        f"largest error {found.largest_error:.3g} of at most {found.tolerance:.3g}",
        f"{found.num_logprobs} log-probabilities of {found.num_prompts} prompts in {found.duration_s:.1f} s",
    ]
    if found.largest_effect <= found.tolerance:
        words.append(
            f"the adapter changes at most {found.largest_effect:.2g}: these prompts do not show whether it is applied"
        )
    return "; ".join(words)


def _where(adapter: Adapter, version: AdapterVersion) -> str:
    return "active" if _is_active(adapter, version) else "registered and not active"
