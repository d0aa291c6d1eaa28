"""`motet generate`: one request, streamed to the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor

from motet.cli import exits
from motet.cli.context import Subparsers, connect, seconds, server_option
from motet.cli.digests import full_digest
from motet.cli.output import json_line, to_plain
from motet.errors import invalid_field
from motet.generation.blocking import GenerationStream
from motet.inputs.constraints import Choices, Constraint, JsonObject, JsonSchema, Lark, Regex
from motet.inputs.conversations import ChatMessage
from motet.inputs.lora_task import LoraTask
from motet.requests import GenerateOptions, Prompt, enum_choices
from motet.types import AdapterUse, BeamSearch, Chunk, Completion
from motet.v1 import types_pb2
from motet.v1.sampling import DESCRIPTIONS

_SAMPLING = types_pb2.SamplingParams.DESCRIPTOR.fields
_JSON_ONLY = ("logprobs", "prompt_logprobs")


def add_parser(commands: Subparsers) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "generate", help="stream a completion", description="Stream a completion.", parents=[server_option()]
    )
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="+",
        help="text to continue; several words are joined by single spaces; - reads it from standard input",
    )
    _add_adapters(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON line per event")
    parser.add_argument("--stats", action="store_true", help="print token counts and times to standard error")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--chat", action="store_true", help="take PROMPT as a user's turn in the chat template")
    what.add_argument("--token-ids", action="store_true", help="take PROMPT as token ids, apart by spaces or commas")
    parser.add_argument("--system", metavar="TEXT", help="system message before PROMPT; implies --chat")
    _add_sampling(parser.add_argument_group("sampling"))
    sampling = parser.add_argument_group("stopping")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate, a count (default: 128)")
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
    sampling.add_argument(
        "--min-tokens", type=int, metavar="N", help="tokens before anything may end it, a count (default: 0)"
    )
    _add_decoding(parser.add_argument_group("several completions"))
    _add_constraint(parser.add_argument_group("structured output"))
    parser.add_argument(
        "--priority", type=int, metavar="N", help="higher runs first within the tenant, from -100 to 100 (default: 0)"
    )
    parser.add_argument(
        "--tenant",
        default=os.environ.get("MOTET_TENANT", ""),
        metavar="NAME",
        help="who it is counted for (default: $MOTET_TENANT, else the server's default)",
    )
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


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME[=SCALE]",
        help="adapter to use (default: the base model); given up to four times, they act together, each with its scale",
    )
    parser.add_argument(
        "--combination",
        choices=["cat", "linear"],
        help="how several adapters are combined, in PEFT's words (default: cat)",
    )
    parser.add_argument(
        "--adapter-digest",
        default="",
        metavar="HEX",
        help="one version of it, by its digest or at least 8 digits that begin it (default: the active version)",
    )
    parser.add_argument(
        "--lora-task", type=int, metavar="N", help="number of weights that were sent before, instead of --adapter"
    )
    parser.add_argument(
        "--lora-weights",
        metavar="DIR",
        help="with --lora-task, directory of an adapter that comes with the request; nothing is registered",
    )


def _add_sampling(group: Any) -> None:
    """A flag for every sampling parameter of the protocol."""
    for field in _SAMPLING:
        flag, about = f"--{field.name.replace('_', '-')}", DESCRIPTIONS[field.name]
        if field.name == "logit_bias":
            group.add_argument(
                flag, action="append", default=[], type=_bias, metavar="ID=X", help=f"{about}; may be repeated"
            )
        elif field.type == FieldDescriptor.TYPE_FLOAT:
            group.add_argument(flag, type=float, metavar="X", help=about)
        elif field.enum_type is not None:
            group.add_argument(flag, choices=list(enum_choices(field.enum_type)), help=about)
        else:
            about += "; needs --json" if field.name in _JSON_ONLY else ""
            group.add_argument(flag, type=int, metavar="N", help=about)


def _add_decoding(group: Any) -> None:
    group.add_argument(
        "--n", type=int, metavar="N", help="completions to return, a count; needs --temperature or --beams (default: 1)"
    )
    group.add_argument(
        "--best-of",
        type=int,
        metavar="N",
        help="completions to sample; the most likely are returned; needs --temperature (default: --n)",
    )
    group.add_argument("--beams", type=int, metavar="N", help="beam search with N beams, from 2 to 16 (default: none)")
    group.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="with --beams, exponent of the length, in [-10, 10] (default: 1)",
    )
    group.add_argument(
        "--early-stopping", action="store_true", help="with --beams, end with the first N completions that have ended"
    )


def _add_constraint(group: Any) -> None:
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", type=Path, metavar="FILE", help="a JSON value valid under this JSON schema")
    one.add_argument("--json-object", action="store_true", help="a JSON object")
    one.add_argument("--regex", metavar="REGEX", help="a text that this regular expression matches as a whole")
    one.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; may be repeated")
    one.add_argument("--grammar", type=Path, metavar="FILE", help="a text of this grammar, in llguidance's Lark")


def _constraint(arguments: argparse.Namespace) -> Constraint | None:
    if arguments.json_schema is not None:
        return JsonSchema(_read(arguments.json_schema, "--json-schema"))
    if arguments.grammar is not None:
        return Lark(_read(arguments.grammar, "--grammar"))
    if arguments.json_object:
        return JsonObject()
    if arguments.regex is not None:
        return Regex(arguments.regex)
    return None if arguments.choice is None else Choices(arguments.choice)


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid_field(flag, f"cannot be read: {error}") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=X, a token id and a number") from None


def _logit_bias(arguments: argparse.Namespace) -> dict[int, float]:
    biases = dict(arguments.logit_bias)
    if len(biases) < len(arguments.logit_bias):
        raise invalid_field("--logit-bias", "names a token twice; give each once")
    return biases


def _beam_search(arguments: argparse.Namespace) -> BeamSearch | None:
    if arguments.beams is not None:
        return BeamSearch(arguments.beams, arguments.length_penalty, True if arguments.early_stopping else None)
    if arguments.length_penalty is not None or arguments.early_stopping:
        raise invalid_field("--beams", "is missing; --length-penalty and --early-stopping belong to a beam search")
    return None


def _refuse_what_has_no_effect(arguments: argparse.Namespace) -> None:
    for name in _JSON_ONLY:
        if getattr(arguments, name) is not None and not arguments.json:
            raise invalid_field(f"--{name.replace('_', '-')}", "is printed as JSON only; add --json")
    if arguments.beams is not None or (arguments.temperature or 0) != 0:
        return
    for flag, value in (("--best-of", arguments.best_of), ("--n", arguments.n)):
        if value is not None and value > 1:
            raise invalid_field(
                flag,
                f"{value} completions at temperature 0 are equal; add --temperature, such as 0.8, or --beams",
            )


def _adapters(arguments: argparse.Namespace) -> GenerateOptions:
    """One plain adapter by its name; several adapters, or one with a scale, as uses; or a LoRA task."""
    named: list[str] = arguments.adapter
    if "" in named:  # of a variable that is not set, say: the base model must not respond in the adapter's place
        raise invalid_field("--adapter", "is empty; give a name, or leave the flag out for the base model")
    if arguments.lora_task is not None or arguments.lora_weights is not None:
        return {"lora_task": _lora_task(arguments), "adapter_digest": arguments.adapter_digest}
    if len(named) < 2 and not any("=" in name for name in named):
        if arguments.combination:
            raise invalid_field("--combination", "it needs two or more --adapter; leave it out")
        return {"adapter": "".join(named), "adapter_digest": arguments.adapter_digest}
    if arguments.adapter_digest:
        raise invalid_field("--adapter-digest", "it goes with one plain --adapter; use NAME@NUMBER=SCALE")
    uses = []
    for name in named:
        adapter, has_scale, scale = name.partition("=")
        try:
            uses.append(AdapterUse(adapter, float(scale) if has_scale else 1.0))
        except ValueError:
            raise invalid_field("--adapter", f"{name!r}: the scale is not a number; use NAME=0.7") from None
    return {"adapters": uses, "combination": arguments.combination}


def _lora_task(arguments: argparse.Namespace) -> LoraTask | int:
    if arguments.lora_task is None:
        raise invalid_field("--lora-task", "is missing; give the number that later requests will name")
    if arguments.adapter or arguments.combination:
        raise invalid_field("--lora-task", "is given beside --adapter or --combination; give one of them")
    if arguments.lora_weights is None:
        return int(arguments.lora_task)
    return LoraTask(arguments.lora_task, arguments.lora_weights)


def _generate(arguments: argparse.Namespace) -> int:
    _refuse_what_has_no_effect(arguments)
    prompt = _prompt(arguments)
    options: GenerateOptions = {
        **_adapters(arguments),
        "max_tokens": arguments.max_tokens,
        "stop": arguments.stop,
        "stop_token_ids": arguments.stop_token_id,
        "ignore_eos": True if arguments.ignore_eos else None,
        "cache_salt": arguments.cache_salt,
        "request_id": arguments.request_id,
        "min_tokens": arguments.min_tokens,
        "n": arguments.n,
        "best_of": arguments.best_of,
        "beam_search": _beam_search(arguments),
        "priority": arguments.priority,
        "tenant": arguments.tenant,
        "constraint": _constraint(arguments),
    }
    given = {field.name: getattr(arguments, field.name) for field in _SAMPLING} | {"logit_bias": _logit_bias(arguments)}
    options.update(cast(GenerateOptions, given))
    with connect(arguments) as client:
        if arguments.adapter_digest and (adapter := options.get("adapter")):
            options["adapter_digest"] = full_digest(client, adapter, arguments.adapter_digest, field="--adapter-digest")
        # Leaving the `with`, by Ctrl-C too, cancels the request.
        with client.generate(prompt, timeout_s=arguments.timeout_s, **options) as stream:
            if arguments.json:
                _print_events(stream)
            elif (arguments.n or 1) > 1:
                _print_completions(stream)
            else:
                _print_text(stream)
            if arguments.stats:
                print(_summary(stream), file=sys.stderr)
    return exits.OK


def _prompt(arguments: argparse.Namespace) -> Prompt:
    text = sys.stdin.read() if arguments.prompt == ["-"] else " ".join(arguments.prompt)
    if arguments.token_ids:
        if arguments.system is not None:
            raise invalid_field("--system", "needs a text prompt; leave --token-ids out")
        parts = text.replace(",", " ").split()
        for part in parts:
            if not (part.isascii() and part.isdigit()):
                raise invalid_field("PROMPT", f"{part!r} is not a token id; with --token-ids give numbers from 0")
        return [int(part) for part in parts]
    if arguments.chat or arguments.system is not None:
        system = [] if arguments.system is None else [ChatMessage("system", arguments.system)]
        return [*system, ChatMessage("user", text)]
    return text


def _print_text(stream: GenerationStream) -> None:
    ends_line = False
    num_tokens = num_chars = 0
    for chunk in stream:
        num_tokens += len(chunk.token_ids)
        num_chars += len(chunk.text)
        if chunk.text:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            ends_line = chunk.text.endswith("\n")
    if num_tokens and not num_chars:
        print(f"motet: the completion has {num_tokens} tokens and no text; --json prints their ids", file=sys.stderr)
    elif not ends_line:
        print(flush=True)


def _print_completions(stream: GenerationStream) -> None:
    for chunk in stream:
        if chunk.finish_reason is not None:
            (completion,) = [completion for completion in stream.completions if completion.index == chunk.index]
            print(f"[{completion.index}] {completion.text}{_rank(completion)}", flush=True)


def _rank(completion: Completion) -> str:
    return "" if completion.finished.score is None else f"  (score {completion.finished.score:.4f})"


def _print_events(stream: GenerationStream) -> None:
    is_started = False
    for chunk in stream:
        if not is_started:
            is_started = True
            print(json_line({"event": "started", **to_plain(stream.started)}), flush=True)
        if chunk.finish_reason is None:
            print(json_line({"event": "delta", **_delta(chunk)}), flush=True)
        else:
            (completion,) = [completion for completion in stream.completions if completion.index == chunk.index]
            print(json_line({"event": "finished", **to_plain(completion.finished)}), flush=True)


def _delta(chunk: Chunk) -> dict[str, Any]:
    delta = {
        "index": chunk.index,
        "token_offset": chunk.token_offset,
        "token_ids": list(chunk.token_ids),
        "text": chunk.text,
    }
    return {**delta, "logprobs": to_plain(chunk.logprobs)} if chunk.logprobs else delta


def _summary(stream: GenerationStream) -> str:
    result = stream.result()
    usage, timings = result.finished.usage, result.finished.timings
    num_generated = sum(completion.finished.usage.completion_tokens for completion in result.completions)
    reasons = ", ".join(dict.fromkeys(completion.finished.finish_reason for completion in result.completions))
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {num_generated} generated, "
        f"ended by {reasons}, seed {result.started.seed}, "
        f"first token after {timings.time_to_first_token_s * 1000:.0f} ms, {timings.total_time_s:.2f} s in all"
    )
