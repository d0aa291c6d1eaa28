"""Refuses devices and dtypes that multiply no FP8 weights, before a model is read."""

from __future__ import annotations

import torch

from contract.fingerprint import NOT_QUANTIZED
from data_plane.errors import ConfigError
from kernels.fp8 import FP8, Fp8Rows, fp8_refusal
from kernels.fp8_linear import MULTIPLE, fp8_linear


def check_device(quantization: str, device: torch.device) -> None:
    """Raise ConfigError for a device that multiplies no FP8 weights, before a model is loaded."""
    if quantization == NOT_QUANTIZED:
        return
    reason: str | None
    if device.type != "cuda" or not torch.version.cuda:
        reason = f"{device.type} multiplies no FP8 weights, only NVIDIA GPUs from compute capability 8.9 on do"
    else:
        reason = fp8_refusal(device, "FP8 weights") or _product_problem(device)
    if reason is not None:
        raise ConfigError(f"--quantization {quantization}: {reason}; give --quantization none")


def check_dtype(quantization: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError for a dtype of activations in which a GPU gives no results of FP8 products."""
    if quantization != NOT_QUANTIZED and device.type == "cuda" and dtype != torch.bfloat16:
        raise ConfigError(
            f"--quantization {quantization}: products of FP8 weights are bfloat16, and the model is served in "
            f"{str(dtype).removeprefix('torch.')}; give --dtype bfloat16 to workers and control plane, or "
            "--quantization none"
        )


def compute_product(device: torch.device) -> None:
    """Compute the smallest product of FP8 rows on the device, to its end."""
    codes = torch.zeros(MULTIPLE, MULTIPLE, dtype=FP8, device=device)
    rows = Fp8Rows(codes, torch.ones(MULTIPLE, device=device))
    fp8_linear(rows, rows, None, torch.bfloat16).cpu()


def _product_problem(device: torch.device) -> str | None:
    """Why this torch cannot multiply there; None: it can. Builds of torch have the product for some devices only."""
    try:
        compute_product(device)
    except RuntimeError as error:  # torch has no narrower one
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return (
            f"torch {torch.__version__} has no product of FP8 rows for {torch.cuda.get_device_name(device)}: {lines[0]}"
        )
    return None
