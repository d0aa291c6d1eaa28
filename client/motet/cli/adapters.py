"""`motet adapters ...`: the registry from the shell."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from motet.cli import exits, rollouts
from motet.cli.context import Subparsers, connect, server_option
from motet.cli.digests import SHORT_DIGITS, VERSION_HELP, full_digest, named
from motet.cli.output import json_line, size, table, transfer_lines
from motet.cli.versions import verification
from motet.errors import invalid_field
from motet.types import Adapter, AdapterTier, AdapterVersion, AdapterVisibility, RegistrationChange

KNOWN_VISIBILITIES = (AdapterVisibility.PRIVATE, AdapterVisibility.SHARED, AdapterVisibility.PUBLIC)


def add_parser(commands: Subparsers) -> None:
    """Declares the group."""
    group = commands.add_parser("adapters", help="register, list, pin and remove adapters", parents=[server_option()])
    actions = group.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, help_text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            name, help=help_text, description=help_text, parents=[server_option()]
        )
        parser.add_argument("--json", action="store_true", help="print JSON, one line per item")
        return parser

    add = action("add", "register an adapter, uploaded or from a root of the server; a known name gets a new version")
    add.add_argument("name", metavar="NAME")
    directory = add.add_argument(
        "directory",
        metavar="DIR",
        help="uploaded: as PEFT's save_pretrained or TensorRT-LLM's converter wrote it; not with --from",
    )
    add.add_argument(
        "--from",
        dest="source",
        action=_InPlaceOf,
        positional=directory,
        metavar="SOURCE",
        help="in place of DIR: ROOT/PATH or ROOT/PATH@REVISION, below a root that the server's operator listed with "
        "--adapter-root; the server reads or downloads it",
    )
    add.add_argument("--display-name", default="", help="free text for people, at most 256 bytes (default: none)")
    add.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    _add_ownership(add)
    rollouts.add_registration_options(add)
    add.add_argument("--check", action="store_true", help="check in full, store nothing")
    verification.add_option(add)
    add.set_defaults(run=_add)
    update = action("update", "change its description, or who sees it")
    update.add_argument("name", metavar="NAME")
    update.add_argument("--display-name", help="free text for people, at most 256 bytes")
    update.add_argument("--label", action="append", metavar="KEY=VALUE", help="in place of all labels; may be repeated")
    _add_ownership(update)
    rollouts.add_update_options(update)
    update.set_defaults(run=_update)
    rollouts.add_actions(action)
    verification.add_action(action)
    rollouts.add_memory_actions(action)
    rollouts.add_watch(action)
    action("list", "all adapters that the caller sees").set_defaults(run=_list)
    for name, help_text, run in (
        ("get", "one adapter in full", _get),
        ("pin", "load it into the host cache and onto the devices, and keep it there", _pin),
        ("unpin", "take the pin back", _unpin),
        ("remove", "delete it, or one version of it; running requests finish first", _remove),
        ("versions", "its versions, newest first", _versions),
        ("activate", "make a registered version the one that new requests get", _activate),
    ):
        parser = action(name, help_text)
        parser.add_argument("name", metavar="NAME")
        if name == "activate":
            parser.add_argument("digest", metavar="VERSION", help=VERSION_HELP)
            parser.add_argument("--expect", metavar="VERSION", help="only if this version is active at present")
        if name == "remove":
            parser.add_argument(
                "--version",
                metavar="VERSION",
                help=f"this version only: {VERSION_HELP}",
            )
            parser.add_argument("--no-wait", action="store_true", help="do not wait until every tier is cleared")
        parser.set_defaults(run=run)


class _InPlaceOf(argparse.Action):
    """An option in place of a positional argument, which is not required then."""

    def __init__(self, *flags: Any, positional: argparse.Action, **options: Any) -> None:
        super().__init__(*flags, **options)
        self._positional = positional

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - as argparse calls it
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002 - as argparse calls it
    ) -> None:
        self._positional.required = False
        setattr(namespace, self.dest, values)


def _add_ownership(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--visibility",
        choices=[visibility.value for visibility in KNOWN_VISIBILITIES],
        help="who may use it beside its owner: nobody, the tenants of --share-with, or every tenant "
        "(default: as it is; a new adapter is private)",
    )
    parser.add_argument(
        "--share-with",
        action="append",
        metavar="TENANT",
        help="let this tenant use it, and of other tenants only those that are named here; may be repeated",
    )
    parser.add_argument("--owner", metavar="TENANT", help="whose it is, for admins (default: the caller's tenant)")


def _visibility(arguments: argparse.Namespace) -> str | None:
    """The visibility to set: naming tenants shares the adapter with them."""
    given: str | None = arguments.visibility
    return AdapterVisibility.SHARED if given is None and arguments.share_with else given


def _labels(arguments: argparse.Namespace) -> dict[str, str]:
    labels = {}
    for label in arguments.label:
        key, equals, value = label.partition("=")
        if not equals:
            raise invalid_field("--label", f"is {label!r}; give KEY=VALUE")
        labels[key] = value
    return labels


def _add(arguments: argparse.Namespace) -> int:
    if arguments.source is not None and arguments.directory is not None:
        raise invalid_field("--from", "is in place of DIR; give one of the two")
    rollout = rollouts.registration_of(arguments)
    described: dict[str, Any] = {
        "display_name": arguments.display_name,
        "labels": _labels(arguments),
        "visibility": _visibility(arguments),
        "shared_with": arguments.share_with or (),
        "owner": arguments.owner or "",
        "rollout": verification.held_back(rollout, arguments),
        "validate_only": arguments.check,
    }
    with connect(arguments) as client:
        if arguments.source is not None:
            with transfer_lines("downloading") as lines:
                adapter = client.adapters.register_from_root(
                    arguments.name, arguments.source, **described, progress=lines.show
                )
        else:
            with transfer_lines("uploading") as lines:
                progress = lines.show if sys.stderr.isatty() else None
                adapter = client.adapters.register(arguments.name, arguments.directory, **described, progress=progress)
        _show_warnings(adapter)
        if arguments.verify and not arguments.check:
            return verification.finish_adding(client, adapter, rollout, arguments)
    if arguments.json:
        print(json_line(adapter))
    else:
        print(_registration_line(adapter, is_check=arguments.check))
    return exits.OK


def _show_warnings(adapter: Adapter) -> None:
    """Print on stderr what the server noticed in the version that was registered."""
    staged = adapter.registration.version if adapter.registration is not None else None
    version = staged or adapter.active_version
    for warning in version.warnings if version is not None else ():
        print(f"motet: warning: {warning}", file=sys.stderr)


def _update(arguments: argparse.Namespace) -> int:
    labels = None if arguments.label is None else _labels(arguments)
    with connect(arguments) as client:
        adapter = client.adapters.update(
            arguments.name,
            display_name=arguments.display_name,
            labels=labels,
            visibility=_visibility(arguments),
            shared_with=arguments.share_with,
            owner=arguments.owner,
            keep_versions=arguments.keep_versions,
            ttl_s=arguments.ttl,
            never_expires=arguments.no_expiry,
        )
    print(json_line(adapter) if arguments.json else f"updated {adapter.id}: {_ownership(adapter)}")
    return exits.OK


def _ownership(adapter: Adapter) -> str:
    """Whose it is, and who else sees it."""
    whose = f"of {adapter.owner}" if adapter.owner else "of no tenant"
    with_whom = f" with {', '.join(adapter.shared_with)}" if adapter.shared_with else ""
    return f"{whose}, {adapter.visibility}{with_whom}"


def _registration_line(adapter: Adapter, *, is_check: bool) -> str:
    """What registering changed: which version is active now, which was before, and the way back to it."""
    change = adapter.registration.change if adapter.registration else RegistrationChange.UNSPECIFIED
    previous = adapter.registration.previous_version if adapter.registration else None
    present = named(adapter.active_version)
    is_same = bool(previous and adapter.active_version and previous.digest == adapter.active_version.digest)
    match change:
        case RegistrationChange.VERSION_ADDED:
            done = f"registered {adapter.id}: {present} is new and active now"
        case RegistrationChange.VERSION_ACTIVATED:
            how = "could not be served and can be again" if is_same else "was known and is active again"
            done = f"registered {adapter.id}: {present} {how}"
        case RegistrationChange.VERSION_SIGNED:
            signer = _signer(adapter.active_version) if adapter.active_version else ""
            return f"{adapter.id} is unchanged: {present} is active already, now signed by {signer}"
        case RegistrationChange.VERSION_STAGED:
            staged = named(adapter.registration.version if adapter.registration else None)
            what = "would be" if is_check else "is"
            return f"{adapter.id}: {staged} {what} there; {present} stays active"
        case RegistrationChange.NONE:
            return f"{adapter.id} is unchanged: {present} is active already"
        case _:
            done = f"registered {adapter.id}: {present}"
    if is_check:
        done = f"checked {adapter.id}, nothing was stored; registering would give: {done.partition(': ')[2]}"
    if previous is None or adapter.active_version is None or is_same:
        return done
    back = previous.digest[:SHORT_DIGITS]
    way_back = "" if is_check else f"; back to it: motet adapters activate {adapter.id} {back}"
    return f"{done}; before: {named(previous)}{way_back}"


def _list(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        if arguments.json:
            for adapter in client.adapters.list():
                print(json_line(adapter))
            return exits.OK
        rows = []
        for adapter in client.adapters.list():
            version = adapter.active_version
            rows.append(
                (
                    adapter.id,
                    adapter.state + (" pinned" if adapter.pinned else ""),
                    version.kind if version else "",
                    version.max_rank if version else 0,
                    size(version.size_bytes) if version else "",
                    version.digest[:SHORT_DIGITS] if version else "",
                    adapter.owner,
                    adapter.visibility,
                    adapter.display_name,
                )
            )
    print(table(("NAME", "STATE", "KIND", "RANK", "SIZE", "VERSION", "OWNER", "VISIBILITY", "DISPLAY NAME"), rows))
    return exits.OK


def _get(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        adapter = client.adapters.get(arguments.name)
    if arguments.json:
        print(json_line(adapter))
        return exits.OK
    places = [place.tier + (f" {place.worker_id}" if place.worker_id else "") for place in adapter.placements]
    lines = [
        ("name", adapter.id),
        ("display name", adapter.display_name),
        ("state", " ".join(filter(None, (adapter.state, adapter.state_reason)))),
        ("pinned", "yes" if adapter.pinned else "no"),
        ("ownership", _ownership(adapter)),
        ("labels", ", ".join(f"{key}={value}" for key, value in sorted(adapter.labels.items()))),
        ("held by", ", ".join(places)),
        *rollouts.lines_of(adapter),
        ("created", adapter.create_time or ""),
        ("updated", adapter.update_time or ""),
        ("etag", adapter.etag),
    ]
    if adapter.active_version is not None:
        version = adapter.active_version
        lines += [
            ("version", f"{version.number}, {version.digest}"),
            ("kind", f"{version.kind}, rank {version.max_rank}, {version.dtype}, {size(version.size_bytes)}"),
            ("modules", str(len(version.target_modules))),
            ("signed by", _signer(version)),
        ]
        if version.files:
            lines.append(("brings", ", ".join(version.files)))
        if version.source:
            lines.append(("source", version.source))
        lines += [("warning", warning) for warning in version.warnings]
        if version.context_length:
            lines.append(("context", f"{version.context_length} tokens, with a rotary embedding of its own"))
        if version.alora_invocation_tokens:
            ids = " ".join(map(str, version.alora_invocation_tokens))
            lines.append(("acts from", f"the last place of the tokens {ids} in a prompt"))
    for name, value in lines:
        print(f"{name + ':':14}{value}".rstrip())
    return exits.OK


def _signer(version: AdapterVersion) -> str:
    """Who signed a version, and with which key."""
    signature = version.signature
    if signature is None:
        return "nobody"
    subject = f" ({signature.subject})" if signature.subject else ""
    return f"{signature.signer}{subject}, {signature.method} {signature.key_fingerprint[:SHORT_DIGITS]}"


def _pin(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        adapter = client.adapters.pin(arguments.name)
    if not any(place.tier is AdapterTier.HOST_CACHE for place in adapter.placements):
        print(
            "motet: the adapter is pinned, but not in the host cache now; `motet status` shows whether the host cache "
            "responds",
            file=sys.stderr,
        )
    return _show(adapter, is_json=arguments.json, verb="pinned")


def _unpin(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        return _show(client.adapters.unpin(arguments.name), is_json=arguments.json, verb="unpinned")


def _remove(arguments: argparse.Namespace) -> int:
    wait = not arguments.no_wait
    with connect(arguments) as client:
        if arguments.version:
            digest = full_digest(client, arguments.name, arguments.version, field="--version")
            client.adapters.delete_version(arguments.name, digest, wait=wait)
        else:
            digest = ""
            client.adapters.delete(arguments.name, wait=wait)
    removed = {"removed": arguments.name} | ({"version": digest} if digest else {})
    text = f"removed {arguments.name}" + (f" version {digest}" if digest else "")
    print(json_line(removed) if arguments.json else text)
    return exits.OK


def _versions(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        versions = list(client.adapters.versions(arguments.name))
        if arguments.json:
            for version in versions:
                print(json_line(version))
            return exits.OK
        adapter = client.adapters.get(arguments.name)
    rows = [
        (
            *(v.number, v.digest, rollouts.role(adapter, v.digest)),
            *(v.kind, v.max_rank, v.dtype, size(v.size_bytes), v.create_time or ""),
            ", ".join(v.version_labels),
            verification.word(v),
        )
        for v in versions
    ]
    print(table(("NUMBER", "DIGEST", "ROLE", "KIND", "RANK", "DTYPE", "SIZE", "CREATED", "LABELS", "VERIFIED"), rows))
    return exits.OK


def _activate(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        digest = full_digest(client, arguments.name, arguments.digest, field="VERSION")
        expected = full_digest(client, arguments.name, arguments.expect, field="--expect") if arguments.expect else ""
        adapter = client.adapters.activate(arguments.name, digest, expected_digest=expected)
    return _show(adapter, is_json=arguments.json, verb="activated")


def _show(adapter: Adapter, *, is_json: bool, verb: str) -> int:
    print(json_line(adapter) if is_json else f"{verb} {adapter.id}: {named(adapter.active_version)}")
    return exits.OK
