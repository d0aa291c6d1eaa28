"""`motet convert`: adapters between PEFT's files and TensorRT-LLM's arrays, and into the weights of their base model.

No server is needed, nor called.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from motet.cli import exits
from motet.cli.context import Subparsers
from motet.cli.local import merge
from motet.cli.output import json_line


def add_parser(commands: Subparsers) -> None:
    """Declares the group."""
    group = commands.add_parser(
        "convert", help="convert adapters between PEFT's and TensorRT-LLM's format, or merge them"
    )
    actions = group.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, help_text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(name, help=help_text, description=help_text)
        parser.add_argument("directory", metavar="DIR", type=Path, help="holds the adapter")
        made = "a new directory to write to" if name == "merge" else "directory to write to; it is made if need be"
        parser.add_argument("out", metavar="OUT", type=Path, help=made)
        parser.add_argument("--json", action="store_true", help="print JSON, one line")
        return parser

    rows = action("peft-to-trtllm", "write lora_weights and lora_config of a PEFT adapter")
    rows.add_argument(
        "--storage-type",
        choices=("float32", "bfloat16", "float16"),
        help="type of the rows (default: the adapter's own, or float32 where that would lose a bit)",
    )
    rows.add_argument(
        "--base-model",
        metavar="DIR",
        type=Path,
        help="the base checkpoint; needed for DoRA, for experts, and for a model whose MLP has no gate",
    )
    rows.set_defaults(run=_peft_to_trtllm)
    peft = action("trtllm-to-peft", "write a PEFT adapter of lora_weights and lora_config")
    peft.add_argument(
        "--base-model",
        metavar="DIR",
        type=Path,
        help="the base checkpoint; needed for arrays that peft-to-trtllm did not write",
    )
    peft.set_defaults(run=_trtllm_to_peft)
    merge.add_arguments(action("merge", "write the base checkpoint with the adapter merged into its weights"))


def _peft_to_trtllm(arguments: argparse.Namespace) -> int:
    from motet.trtllm.to_rows import peft_to_trtllm

    result = peft_to_trtllm(
        arguments.directory, arguments.out, storage_type=arguments.storage_type, base_model=arguments.base_model
    )
    if arguments.json:
        print(json_line(result))
    else:
        print(f"{result.num_rows} rows of {result.dtype} in {arguments.out}: {', '.join(result.files)}")
    if not result.is_exact:
        print(
            f"motet: values were rounded to {result.dtype}, so the way back is not exact, and the digest differs; "
            "leave --storage-type out to keep every bit",
            file=sys.stderr,
        )
    return exits.OK


def _trtllm_to_peft(arguments: argparse.Namespace) -> int:
    from motet.trtllm.to_peft import trtllm_to_peft

    result = trtllm_to_peft(arguments.directory, arguments.out, base_model=arguments.base_model)
    if arguments.json:
        print(json_line(result))
    else:
        print(f"{result.num_rows} rows of {result.dtype} in {arguments.out}: {', '.join(result.files)}")
    return exits.OK
