"""Examines where a worker would run: torch, the device, the compiler, and the way to the control plane."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from contract.settings.findings import Finding, State
from data_plane.config import WorkerConfig
from kernels.native.compiler import find_compiler, missing_compiler

CONNECT_TIMEOUT_S = 5.0


def examine(config: WorkerConfig) -> Iterator[Finding]:
    """Everything that can be looked at without the checkpoint. Imports torch."""
    import torch

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        memory = torch.cuda.get_device_properties(0).total_memory
        detail = f"{torch.cuda.get_device_name(0)}, {memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        yield Finding("GPU", State.OK, detail)
    elif config.device.startswith("cuda"):
        advice = "install the driver and a build of torch with CUDA, or give --device cpu"
        yield Finding("GPU", State.WRONG, f"--device {config.device}, and torch {torch.__version__} sees none", advice)
    else:
        yield Finding("GPU", State.OK, f"none: this worker computes on the CPU, with {config.num_threads} threads")
    compiler = find_compiler()
    if compiler is not None:
        yield Finding("compiler", State.OK, " ".join(compiler))
    elif not has_gpu:
        yield Finding("compiler", State.WARNING, missing_compiler(), "without it a CPU serves several times slower")
    yield _control_plane(config.control_plane)


def _control_plane(address: str) -> Finding:
    name, (host, _, port) = f"control plane at {address}", address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        advice = "start the control plane, or correct --control-plane; a worker tries again until it is there"
        return Finding(name, State.WARNING, str(error.strerror or error), advice)
    return Finding(name, State.OK, "its port is open")
