"""Which modules of a model take adapters, and why the others do not.

An adapter's product is added to a module's output row by row. So row i of the output must be token i of the step, which
the passes of packing.py show.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from data_plane.models.mixtures.adapters import mixture_targets
from data_plane.models.mixtures.parts import is_mixture_part
from data_plane.models.packing import PackedPasses, ProbePass, differs
from data_plane.models.probe import head_and_embedding
from data_plane.plan import TargetKind, TargetModule

_STACKED_DIMS = 3  # of a parameter that holds one matrix for each expert


def find_targets(model: PreTrainedModel, request: ProbePass, passes: PackedPasses) -> list[TargetModule]:
    """Every module with a weight that adapters could name. Modules that take adapters have an empty reason.

    Linears are in the order of their calls.
    """
    head, embedding = head_and_embedding(model)
    modules = dict(model.named_modules())
    called = [name for name in request.recorder.linear_inputs if name in modules]
    found: list[TargetModule] = []
    for name in dict.fromkeys([*called, *modules]):
        module = modules[name]
        kind = {head: TargetKind.HEAD, embedding: TargetKind.EMBEDDING}.get(name, TargetKind.LINEAR)
        sizes = [parameter.shape for parameter in module.parameters(recurse=False) if parameter.dim() >= 2]
        if not sizes:
            continue
        mixture = None
        if is_mixture_part(module):
            mixture = mixture_targets(module, name, reason=_reason(model, name, kind, request, passes))
        if mixture is not None:
            found += mixture
        elif isinstance(module, nn.Linear | nn.Embedding):
            reason = _reason(model, name, kind, request, passes)
            rows, columns = module.weight.shape
            sides = (rows, columns) if isinstance(module, nn.Embedding) else (columns, rows)
            found.append(TargetModule(name, kind, *sides, reason))
        else:
            what = "stacked parameters" if any(len(size) == _STACKED_DIMS for size in sizes) else "parameters"
            reason = f"its class {type(module).__name__} holds {what} and is not a linear layer"
            found.append(TargetModule(name, kind, sizes[0][-1], sizes[0][-2], reason))
    return found


def _reason(model: PreTrainedModel, name: str, kind: TargetKind, request: ProbePass, passes: PackedPasses) -> str:
    """Why a module takes no adapters by the calls that it gets; empty: it does."""
    module = model.get_submodule(name)
    if isinstance(module, nn.Embedding) and kind is not TargetKind.EMBEDDING:
        return "of the embeddings only the one that tokens are looked up in takes adapters"
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        return f"its class {type(module).__name__} computes more than a product"
    probe_passes = [request, passes.packed, passes.single, *([passes.large] if passes.large else [])]
    counts = [[len(rows) for rows in each.recorder.linear_inputs.get(name, [])] for each in probe_passes]
    if not any(counts):
        return "the forward pass does not call it"
    if max(map(len, counts)) > 1:
        return "the forward pass calls it more than once"
    of_kept = [[len(each.kept)] for each in probe_passes]
    of_all = [[len(each.positions)] for each in probe_passes]
    if counts != (of_kept if kind is TargetKind.HEAD else of_all):
        return f"it sees only {'the tokens whose logits are wanted' if counts == of_kept else 'some of the tokens'}"
    same = passes.reordered.same
    assert same is not None, "the reordered tokens are those of the packed pass"
    (rows,), (rows_there,) = (
        probe_pass.recorder.linear_inputs[name] for probe_pass in (passes.reordered, passes.packed)
    )
    if differs(rows, rows_there[same.there], model.dtype):
        return "it sees the tokens in an order of its own"
    return ""
