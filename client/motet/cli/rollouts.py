"""`motet adapters label|canary|rollback|load|unload|watch`, and the options of other actions about rollouts."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from motet.cli import exits
from motet.cli.context import connect
from motet.cli.digests import SHORT_DIGITS, VERSION_HELP, full_digest, named
from motet.cli.output import json_line, size, table
from motet.errors import invalid_field
from motet.types import Adapter, AdapterCanary, AdapterTier, Residency, ResidencyOutcome, VersionRollout

_PER_PERCENT = 10


def add_actions(action: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Declares the actions."""
    label = action("label", "let a label point to a version, for requests that name NAME@LABEL")
    label.add_argument("name", metavar="NAME")
    label.add_argument("label", metavar="LABEL")
    label.add_argument("version", metavar="VERSION", nargs="?", help=VERSION_HELP)
    label.add_argument("--remove", action="store_true", help="remove the label")
    label.set_defaults(run=_label)
    canary = action("canary", "give a version a share of the requests that name no version")
    canary.add_argument("name", metavar="NAME")
    canary.add_argument("version", metavar="VERSION", nargs="?", help=VERSION_HELP)
    canary.add_argument("percent", metavar="PERCENT", nargs="?", type=float, help="from 0.1 to 100, in steps of 0.1")
    canary.add_argument("--end", action="store_true", help="end it; the active version gets all requests")
    canary.add_argument("--promote", action="store_true", help="make its version the active one, which ends it")
    canary.set_defaults(run=_canary)
    rollback = action("rollback", "make the version active that was active before")
    rollback.add_argument("name", metavar="NAME")
    rollback.set_defaults(run=_rollback)


def add_registration_options(parser: argparse.ArgumentParser) -> None:
    """Options of `motet adapters add`."""
    parser.add_argument(
        "--keep-active", action="store_true", help="the version that is active stays active (default: the new one is)"
    )
    parser.add_argument(
        "--canary", type=float, default=0.0, metavar="PERCENT", help="give the new version this share of the requests"
    )
    parser.add_argument(
        "--version-label", action="append", default=[], metavar="LABEL", help="points to the version; may be repeated"
    )
    _add_limits(parser)


def add_update_options(parser: argparse.ArgumentParser) -> None:
    """Options of `motet adapters update`."""
    _add_limits(parser)
    parser.add_argument("--no-expiry", action="store_true", help="keep the adapter until somebody deletes it")


def registration_of(arguments: argparse.Namespace) -> VersionRollout:
    """What the options of `motet adapters add` say."""
    return VersionRollout(
        keep_active=arguments.keep_active,
        canary_per_mille=_per_mille(arguments.canary, "--canary", lowest=0),
        version_labels=tuple(arguments.version_label),
        keep_versions=arguments.keep_versions,
        ttl_s=arguments.ttl,
    )


def lines_of(adapter: Adapter) -> list[tuple[str, object]]:
    """What `motet adapters get` says of the rollout."""
    canary = adapter.canary
    share = "" if canary is None else f"{canary.digest[:SHORT_DIGITS]} with {_percent(canary)}"
    labels = sorted(adapter.version_labels.items())
    return [
        ("versions", ", ".join(f"{label}={digest[:SHORT_DIGITS]}" for label, digest in labels)),
        ("canary", share),
        ("keeps", f"the newest {adapter.keep_versions} versions" if adapter.keep_versions else "all versions"),
        ("expires", adapter.expire_time or "never"),
        ("before", ", ".join(digest[:SHORT_DIGITS] for digest in adapter.previous_digests)),
    ]


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep-versions", type=int, metavar="COUNT", help="how many of the newest versions to keep; 0: all of them"
    )
    parser.add_argument("--ttl", type=float, metavar="SECONDS", help="delete the adapter after this time")


def role(adapter: Adapter, digest: str) -> str:
    """What a version is for requests that name no version: the active one, the canary with its share, or nothing."""
    if adapter.active_version is not None and adapter.active_version.digest == digest:
        return "active"
    if adapter.canary is not None and adapter.canary.digest == digest:
        return f"canary {_percent(adapter.canary)}"
    return ""


def _percent(canary: AdapterCanary) -> str:
    return f"{canary.per_mille / _PER_PERCENT:g}%"


def _per_mille(percent: float, field: str, *, lowest: int = 1) -> int:
    per_mille = round(percent * _PER_PERCENT) if lowest / _PER_PERCENT <= percent <= 100 else -1
    if per_mille < 0 or abs(per_mille - percent * _PER_PERCENT) > 1e-6:
        raise invalid_field(field, f"is {percent:g}; give {lowest / _PER_PERCENT:g} to 100 percent in steps of 0.1")
    return per_mille


def _label(arguments: argparse.Namespace) -> int:
    if arguments.remove == (arguments.version is not None):
        raise invalid_field("VERSION", "give a version, or --remove")
    with connect(arguments) as client:
        digest = None
        if arguments.version is not None:
            digest = full_digest(client, arguments.name, arguments.version, field="VERSION")
        adapter = client.adapters.set_label(arguments.name, arguments.label, digest)
    if arguments.json:
        print(json_line(adapter))
    elif digest is None:
        print(f"removed label {arguments.label} of {adapter.id}")
    else:
        print(f"{adapter.id}@{arguments.label} is version {digest[:SHORT_DIGITS]}")
    return exits.OK


def _canary(arguments: argparse.Namespace) -> int:
    if arguments.end + arguments.promote + (arguments.version is not None) != 1:
        raise invalid_field("VERSION", "give a version and PERCENT, or --end, or --promote")
    with connect(arguments) as client:
        if arguments.end:
            adapter = client.adapters.set_canary(arguments.name, None)
            done = f"ended the canary of {adapter.id}"
        elif arguments.promote:
            adapter = client.adapters.get(arguments.name)
            if adapter.canary is None:
                raise invalid_field("--promote", f"adapter {adapter.id!r} has no canary")
            adapter = client.adapters.activate(adapter.id, adapter.canary.digest, etag=adapter.etag)
            done = f"promoted the canary of {adapter.id}: {named(adapter.active_version)} is active"
        else:
            if arguments.percent is None:
                raise invalid_field("PERCENT", "is missing; give the share of the requests")
            per_mille = _per_mille(arguments.percent, "PERCENT")
            digest = full_digest(client, arguments.name, arguments.version, field="VERSION")
            adapter = client.adapters.set_canary(arguments.name, AdapterCanary(digest, per_mille))
            done = f"version {digest[:SHORT_DIGITS]} of {adapter.id} gets {arguments.percent:g}% of the requests"
    print(json_line(adapter) if arguments.json else done)
    return exits.OK


def _rollback(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        before = client.adapters.get(arguments.name)
        adapter = client.adapters.roll_back(arguments.name, etag=before.etag)
    now, then = named(adapter.active_version), named(before.active_version)
    line = f"rolled back {adapter.id}: {now} is active, before: {then}"
    print(json_line(adapter) if arguments.json else line)
    return exits.OK


# ---- memory and watches ----

# After these the version is where it was to be, or is gone.
_DONE = {
    ResidencyOutcome.LOADED,
    ResidencyOutcome.WAS_LOADED,
    ResidencyOutcome.UNLOADED,
    ResidencyOutcome.WAS_ABSENT,
}


def add_memory_actions(action: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Declares the actions."""
    for name, help_text, run in (
        ("load", "load it into the workers or the host cache before requests need it", _load),
        ("unload", "take it out of the workers or the host cache; running requests finish first", _unload),
    ):
        parser = action(name, help_text)
        parser.add_argument("name", metavar="NAME", help="also NAME@NUMBER and NAME@LABEL")
        parser.add_argument("--digest", default="", metavar="DIGEST", help="of the version (default: the active one)")
        parser.add_argument("--host-cache", action="store_true", help="the host cache (default: the workers)")
        parser.add_argument(
            "--worker", action="append", default=[], metavar="ID", help="only this one; may be repeated"
        )
        parser.add_argument(
            "--wait", type=float, default=30.0, metavar="SECONDS", help="at most 300 (default: %(default)g)"
        )
        parser.set_defaults(run=run)


def add_watch(action: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Declares `watch`."""
    watch = action("watch", "print changes as they happen, until it is interrupted")
    watch.add_argument("name", metavar="NAME", nargs="?", default="", help="only this one (default: all)")
    watch.add_argument("--residency", action="store_true", help="also where versions lie")
    watch.add_argument("--resume", default="", metavar="TOKEN", help="go on after the event that had this token")
    watch.set_defaults(run=_watch)


def _watch(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        events = client.adapters.watch(
            arguments.name, resume_token=arguments.resume, with_residency=arguments.residency
        )
        for event in events:
            if arguments.json:
                print(json_line(event), flush=True)
                continue
            places = ", ".join(f"{place.tier} {place.worker_id}".rstrip() for place in event.placements)
            active = event.adapter.active_version if event.adapter is not None else None
            digest = event.digest or (active.digest if active is not None else "")
            parts = (event.kind, event.adapter_id, digest[:SHORT_DIGITS], places, event.reason)
            print("  ".join(part for part in parts if part), flush=True)
    return exits.OK


def _load(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        results = client.adapters.load(
            arguments.name,
            digest=arguments.digest,
            tier=_tier(arguments),
            worker_ids=arguments.worker,
            wait_s=arguments.wait,
        )
    return _show_places(results, is_json=arguments.json)


def _unload(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        results = client.adapters.unload(
            arguments.name,
            digest=arguments.digest,
            tier=_tier(arguments),
            worker_ids=arguments.worker,
            wait_s=arguments.wait,
        )
    return _show_places(results, is_json=arguments.json)


def _tier(arguments: argparse.Namespace) -> AdapterTier:
    return AdapterTier.HOST_CACHE if arguments.host_cache else AdapterTier.ARENA


def _show_places(results: tuple[Residency, ...], *, is_json: bool) -> int:
    if is_json:
        for result in results:
            print(json_line(result))
    else:
        rows = [
            (
                result.worker_id or result.tier,
                result.outcome,
                size(result.missing_bytes) if result.missing_bytes else "",
                result.reason,
            )
            for result in results
        ]
        print(table(("WHERE", "OUTCOME", "MISSING", "REASON"), rows))
    return exits.OK if results and all(result.outcome in _DONE for result in results) else exits.FAILED
