"""Log-probabilities of prompts under merged float32 weights: `python -m data_plane.verify MODEL_DIR
WORK_DIR QUANTIZATION`.

A process of its own beside a server, for `motet adapters verify`. It shares the reading of packed adapters with the
worker, and none of the worker's arithmetic: transformers computes, with W + scaling * B A in the place of W. It needs 4
bytes of memory for each parameter of the model, and as many again for a weight that the model ties.

WORK_DIR holds manifest.json, the chunks as 0, 1, ... and prompts.json: for each prompt its "token_ids", and as
"active_from" how many of them the base model computes before the adapter acts. The process writes result.json: for
"base" and for "merged" a list for each prompt, of the log-probabilities of its tokens from the second on. For an
adapter that cannot be compared it writes the reason into refusal.txt instead.

With QUANTIZATION fp8 the base weights are those that the worker's FP8 codes stand for, since an adapter is added to
them. "base_rounded" and "merged_rounded" are then what comes of inputs that are rounded, too; else they are "base" and
"merged".
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from contract.fingerprint import FP8_WEIGHTS
from data_plane.adapters.format.manifest import Manifest
from data_plane.adapters.format.packed import TORCH_DTYPES
from data_plane.merging.model_modules import merge_module, replace_rows, untie
from data_plane.merging.packed_files import PackedFiles
from data_plane.merging.weights import CannotMerge
from data_plane.models.checkpoint.quantized import quantization_of, read_dequantized
from data_plane.models.fp8.rounded_model import round_weights, rounding_inputs

REFUSED = 3  # the exit status of a process that wrote a refusal
Prompt = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Compute and write the result."""
    model_dir, work_dir, quantization = Path(arguments[0]), Path(arguments[1]), arguments[2]
    prompts: list[Prompt] = json.loads((work_dir / "prompts.json").read_text("utf-8"))
    model = _read_model(model_dir)
    model.eval()
    vocab_size = model.get_input_embeddings().weight.shape[0]
    try:
        with torch.inference_mode():
            packed = PackedFiles(work_dir)
            dtype = TORCH_DTYPES[packed.manifest.dtype]
            rounded = round_weights(model, dtype) if quantization == FP8_WEIGHTS else {}
            known = [known_ids(prompt["token_ids"], vocab_size) for prompt in prompts]
            ways: dict[str, Callable[[], AbstractContextManager[None]]] = {"": nullcontext}
            if rounded:
                ways["_rounded"] = partial(rounding_inputs, list(rounded.values()))
            result, beginnings = dict[str, list[list[float]]](), dict[str, list[tuple[Any, torch.Tensor | None]]]()
            for way, context in ways.items():
                with context():
                    result[f"base{way}"] = [logprobs(model, token_ids) for token_ids in known]
                    beginnings[way] = [beginning(model, prompt) for prompt in prompts]
            num_tokens = merge(model, packed)
            for way, context in ways.items():
                with context():
                    result[f"merged{way}"] = [
                        logprobs(model, prompt["token_ids"], *begun, num_tokens=num_tokens)
                        for prompt, begun in zip(prompts, beginnings[way], strict=True)
                    ]
    except CannotMerge as refusal:
        (work_dir / "refusal.txt").write_text(str(refusal), encoding="utf-8")
        return REFUSED
    for name in ("base", "merged"):
        result.setdefault(f"{name}_rounded", result[name])
    (work_dir / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


def _read_model(model_dir: Path) -> Any:
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    if (how := quantization_of(config)) is not None:
        return read_dequantized(model_dir, config, how, torch.float32)
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, trust_remote_code=False)


def known_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """The prompt for the base model, which has other tokens in the place of those that an adapter adds."""
    return [token_id % vocab_size for token_id in token_ids]


def beginning(model: Any, prompt: Prompt) -> tuple[Any, torch.Tensor | None]:
    """Keys, values and logits [tokens, vocabulary] of the tokens that the base model computes; nothing for none."""
    token_ids = prompt["token_ids"][: prompt["active_from"]]
    if not token_ids:
        return None, None
    output = model(input_ids=torch.tensor([token_ids]), use_cache=True)
    return output.past_key_values, output.logits[0]


def logprobs(
    model: Any,
    prompt: Sequence[int],
    cache: Any = None,
    before: torch.Tensor | None = None,
    *,
    num_tokens: int | None = None,
) -> list[float]:
    """Natural log-probabilities of the tokens from the second on. `cache` has the tokens whose logits are `before`."""
    num_before = 0 if before is None else len(before)
    token_ids = torch.tensor([list(prompt)])
    logits = model(input_ids=token_ids[:, num_before:], past_key_values=cache, use_cache=cache is not None).logits[0]
    if before is not None:
        logits = torch.cat([before, logits])
    distributions = logits[:-1, :num_tokens].double().log_softmax(-1)
    found: list[float] = distributions.gather(1, token_ids[0, 1:, None]).flatten().tolist()
    return found


def merge(model: Any, packed: PackedFiles) -> int | None:
    """Put the packed adapter into the weights of the model. Returns the size of its own vocabulary, if it has one."""
    if packed.manifest.rope is not None:
        _rotate(model, packed.manifest)
    untie(model, packed.modules.keys() | packed.rows.keys())
    for index, _ in enumerate(packed.manifest.chunks):
        for part in packed.read_modules(index):
            merge_module(model, part)
    for name in packed.rows:  # after the merging: they have LoRA's part already
        replace_rows(model.get_submodule(name), packed.read_rows(name), packed.manifest.num_tokens)
    return packed.manifest.num_tokens


def _rotate(model: Any, manifest: Manifest) -> None:
    """Give the model the rotary embedding that it has with the adapter's parameters in its configuration."""
    rope, rotary = manifest.rope, getattr(model.base_model, "rotary_emb", None)
    if rope is None or rotary is None:
        raise CannotMerge("the model has no rotary embedding that all layers share, and the adapter brings one")
    config = copy.deepcopy(model.config.get_text_config())
    own = config.rope_parameters or {}
    kept = {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if name in own}
    config.rope_parameters = kept | dict(rope.parameters)
    model.base_model.rotary_emb = type(rotary)(config=config)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
