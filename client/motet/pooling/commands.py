"""`motet embed` and `motet classify`: vectors and classes of texts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from motet.cli.context import Subparsers, connect, seconds, server_option
from motet.cli.digests import full_digest
from motet.cli.output import json_line, to_plain
from motet.client import Client
from motet.errors import invalid_field
from motet.pooling.calls import Pooling, PoolingInput, PoolingOptions, ProblemType


def add_embed(commands: Subparsers) -> None:
    """Declares `motet embed`."""
    parser = _parser(commands, "embed", "print the embedding of each text, one JSON list a line")
    parser.add_argument("--adapter", default="", metavar="NAME", help="adapter to use (default: the base model)")
    parser.add_argument(
        "--pooling",
        choices=[kind.value for kind in Pooling if kind is not Pooling.UNSPECIFIED],
        help="hidden state that stands for a text (default: last)",
    )
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep the first N values (default: all)")
    parser.add_argument("--no-normalize", action="store_true", help="do not divide by the length")
    parser.set_defaults(run=_embed)


def add_classify(commands: Subparsers) -> None:
    """Declares `motet classify`."""
    parser = _parser(commands, "classify", "print the class of each text")
    parser.add_argument("--adapter", required=True, metavar="NAME", help="adapter with a score head")
    parser.add_argument(
        "--problem-type",
        choices=[kind.value for kind in ProblemType if kind is not ProblemType.UNSPECIFIED],
        help="what the logits mean (default: what the adapter says)",
    )
    parser.set_defaults(run=_classify)


def _parser(commands: Subparsers, name: str, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", parents=[server_option()]
    )
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="one input each; - reads one from each line of input")
    parser.add_argument("--token-ids", action="store_true", help="take TEXT as token ids, apart by spaces or commas")
    parser.add_argument(
        "--adapter-digest",
        default="",
        metavar="HEX",
        help="one version of the adapter, by its digest or at least 8 digits that begin it (default: the active one)",
    )
    parser.add_argument("--json", action="store_true", help="print the whole response as one JSON line")
    parser.add_argument(
        "--priority", type=int, metavar="N", help="higher runs first within the tenant, from -100 to 100 (default: 0)"
    )
    parser.add_argument(
        "--cache-salt", default="", metavar="TEXT", help="prefix-cache partition, at most 128 bytes (default: none)"
    )
    parser.add_argument("--timeout-s", type=seconds, default=600.0, metavar="S", help="seconds in all (default: 600)")
    return parser


def _embed(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        found = client.embed(
            _inputs(arguments),
            adapter=arguments.adapter,
            pooling=arguments.pooling,
            normalize=False if arguments.no_normalize else None,
            dimensions=arguments.dimensions,
            timeout_s=arguments.timeout_s,
            **_options(client, arguments),
        )
    if arguments.json:
        print(json_line(to_plain(found)))
    else:
        for embedding in found.embeddings:
            print(json_line(list(embedding.values)))
    return 0


def _classify(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        found = client.classify(
            _inputs(arguments),
            adapter=arguments.adapter,
            problem_type=arguments.problem_type,
            timeout_s=arguments.timeout_s,
            **_options(client, arguments),
        )
    if arguments.json:
        print(json_line(to_plain(found)))
        return 0
    for each in found.classifications:
        numbers = each.probabilities or each.logits
        values = "  ".join(f"{label} {value:.4f}" for label, value in zip(found.labels, numbers, strict=True))
        print(f"{each.label}\t{values}" if each.probabilities else values)
    return 0


def _options(client: Client, arguments: argparse.Namespace) -> PoolingOptions:
    digest = arguments.adapter_digest
    if digest:
        digest = full_digest(client, arguments.adapter, digest, field="adapter_digest")
    return PoolingOptions(adapter_digest=digest, cache_salt=arguments.cache_salt, priority=arguments.priority)


def _inputs(arguments: argparse.Namespace) -> Sequence[PoolingInput]:
    texts: list[str] = []
    for text in arguments.texts:
        texts += [line.rstrip("\n") for line in sys.stdin] if text == "-" else [text]
    if not arguments.token_ids:
        return texts
    return [_token_ids(text) for text in texts]


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise invalid_field("inputs", f"{text[:40]!r} is not a list of token ids; give numbers") from None
