"""DoRA (Liu et al., arXiv 2402.09353, section 4): one scale for each output, computed when an adapter is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from data_plane.adapters.kinds.adapter_kind import PART_A, PART_B, AdapterKind, PackedModule, Part

if TYPE_CHECKING:
    import torch

    from kernels.fp8 import Fp8Rows

# float32 copies of the base weight's rows that are held at a time, twice over.
SLICE_BYTES = 32 << 20


class Dora(AdapterKind):
    """A, B and a magnitude for each output. The arena keeps magnitude / norm in the magnitude's place."""

    name = "dora"
    parts: ClassVar[tuple[Part, ...]] = (PART_A, PART_B, Part("magnitude", ("out_features",), "float32"))
    tables: ClassVar[tuple[str, ...]] = ("dora_scale",)

    def vectors(self, packed: PackedModule) -> Mapping[str, torch.Tensor]:
        """See AdapterKind."""
        a, b, sizes = packed.tensors["a"], packed.tensors["b"], packed.sizes
        scale = dora_scale(packed.base.weight(sizes.name), a, b, sizes.scaling, packed.tensors["magnitude"])
        return {"dora_scale": scale}


class NormalisedDora(AdapterKind):
    """A, B and the DoRA scale itself, as TensorRT-LLM has it: nothing is left to compute."""

    name = "dora"
    parts: ClassVar[tuple[Part, ...]] = (PART_A, PART_B, Part("dora_scale", ("out_features",), "float32"))
    tables: ClassVar[tuple[str, ...]] = ("dora_scale",)

    def vectors(self, packed: PackedModule) -> Mapping[str, torch.Tensor]:
        """See AdapterKind."""
        return {"dora_scale": packed.tensors["dora_scale"]}


def dora_scale(
    weight: torch.Tensor | Fp8Rows, a: torch.Tensor, b: torch.Tensor, scaling: float, magnitude: torch.Tensor
) -> torch.Tensor:
    """magnitude / norm of the rows of weight + scaling * B.T @ A, float32 [out] on the host.

    weight [out, in]; A [rank, in], B [rank, out] and magnitude [out] on the host. The norms are float32 sums of
    the values that the model multiplies with. Raises ValueError for a norm that is 0 or not finite.
    """
    norm = _row_norms(weight, a.to(weight.device).float(), b.to(weight.device).float(), scaling).cpu()
    scale = magnitude / norm
    wrong = ~scale.isfinite() | ~norm.isfinite() | (norm == 0)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"output {row} has magnitude {float(magnitude[row]):g} over a norm of {float(norm[row]):g}; "
            "both must be finite and the norm above 0"
        )
    return scale


def _row_norms(weight: torch.Tensor | Fp8Rows, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    import torch

    num_rows = max(SLICE_BYTES // (4 * weight.shape[1]), 1)
    norms = []
    for begin in range(0, len(weight), num_rows):
        rows = slice(begin, begin + num_rows)
        merged = torch.addmm(weight[rows].float(), b[:, rows].T, a, alpha=scaling)
        norms.append(torch.linalg.vector_norm(merged, dim=1))
    return torch.cat(norms)
