"""Log-probabilities of prompts under merged float32 weights: `python -m data_plane.verify MODEL_DIR WORK_DIR`.

A process of its own beside a server, for `motet adapters verify`. It shares the reading of packed adapters with the
worker, and none of the worker's arithmetic: transformers computes, with W + scaling * B A in the place of W. It needs 4
bytes of memory for each parameter of the model, and as many again for a weight that the model ties.

WORK_DIR holds manifest.json, the chunks as 0, 1, ... and prompts.json, a list of lists of token ids. The process writes
result.json: for "base" and for "merged" a list for each prompt, of the log-probabilities of its tokens from the second
on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from data_plane.adapters.format.manifest import Manifest, ModuleEntry, read_manifest, verify_chunk
from data_plane.adapters.format.packed import ModuleTensors, read_chunk

_PARTS = {"a", "b", "magnitude", "bias", "base_bias"}  # of the kinds that are merged here


def main(arguments: Sequence[str]) -> int:
    """Compute and write the result."""
    model_dir, work_dir = Path(arguments[0]), Path(arguments[1])
    prompts = json.loads((work_dir / "prompts.json").read_text("utf-8"))
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, trust_remote_code=False)
    model.eval()
    with torch.inference_mode():
        base = [logprobs(model, prompt) for prompt in prompts]
        merge(model, work_dir)
        merged = [logprobs(model, prompt) for prompt in prompts]
    (work_dir / "result.json").write_text(json.dumps({"base": base, "merged": merged}), encoding="utf-8")
    return 0


def logprobs(model: Any, prompt: Sequence[int]) -> list[float]:
    """Of each token from the second on, natural logarithms."""
    token_ids = torch.tensor([list(prompt)])
    distributions = model(input_ids=token_ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    found: list[float] = distributions.gather(1, token_ids[0, 1:, None]).flatten().tolist()
    return found


def merge(model: Any, work_dir: Path) -> None:
    """Put the packed adapter into the weights of the model."""
    data = (work_dir / "manifest.json").read_bytes()
    manifest = read_manifest(data, hashlib.sha256(data).hexdigest())
    _refuse_unknown(model, manifest)
    _untie(model, {module.name for chunk in manifest.chunks for module in chunk.modules})
    for index, chunk in enumerate(manifest.chunks):
        content = (work_dir / str(index)).read_bytes()
        verify_chunk(chunk, content, manifest.digest)
        for part in read_chunk(manifest, chunk, content):
            _merge_module(model.get_submodule(part.module.name), part)


def _refuse_unknown(model: Any, manifest: Manifest) -> None:
    """End the process for an adapter that is more than changes of single weights: the result would be wrong."""
    if manifest.rope is not None:
        raise SystemExit("an adapter with a rotary embedding of its own cannot be verified yet")
    if manifest.alora_invocation_tokens:
        raise SystemExit("an activated adapter (alora_invocation_tokens) cannot be verified yet")
    if any(chunk.rows for chunk in manifest.chunks):
        raise SystemExit("an adapter with rows of embedding or head cannot be verified yet")
    for module in (module for chunk in manifest.chunks for module in chunk.modules):
        parts = {part.name for part in module.kind.parts}
        try:
            weight = model.get_submodule(module.name).weight
        except AttributeError:
            raise SystemExit(f"{module.name} is no module with a weight and cannot be verified yet") from None
        if parts - _PARTS or weight.dim() != 2:
            raise SystemExit(f"{module.name} has {', '.join(sorted(parts - _PARTS))} and cannot be verified yet")


def _untie(model: Any, names: set[str]) -> None:
    """Give each module that the adapter changes a weight of its own: an adapter on one does not change the other."""
    for name in names:
        module = model.get_submodule(name)
        module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)


def _merge_module(module: Any, part: ModuleTensors) -> None:
    tensors = {name: tensor.float() for name, tensor in part.tensors.items()}
    entry = part.module
    if "a" in tensors:
        # [out, in] of a linear and a head; an embedding and GPT-2's Conv1D lie the other way round.
        weight = module.weight.T if _is_transposed(module, entry) else module.weight
        weight += entry.scaling * tensors["b"].T @ tensors["a"]
        if "magnitude" in tensors:
            weight *= (tensors["magnitude"] / torch.linalg.vector_norm(weight, dim=1)).unsqueeze(1)
    own = getattr(module, "bias", None)
    bias = tensors.get("base_bias", own)
    if "bias" in tensors:  # LoRA's: scaled with the product
        added = entry.scaling * tensors["bias"]
        bias = added if bias is None else bias + added
    if bias is not None and bias is not own:
        module.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)


def _is_transposed(module: Any, entry: ModuleEntry) -> bool:
    return entry.is_embedding or type(module).__name__ == "Conv1D"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
