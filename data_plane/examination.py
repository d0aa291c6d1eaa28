"""Examines where a worker would run: torch, device, native code, ports, certificate, the way to the control plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from motet.tls import TlsError

from contract.settings.findings import Finding, State
from contract.settings.probes import examine_connection, examine_port, examine_validity
from data_plane.config import WorkerConfig
from kernels.native.build import stored_libraries
from kernels.native.compiler import find_compiler, missing_compiler


def examine(config: WorkerConfig, wall_clock: Callable[[], float] = time.time) -> Iterator[Finding]:
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
    if not has_gpu or config.device == "cpu":
        yield _native_code(config)
    if config.worker_metrics_listen is not None:
        yield examine_port("--worker-metrics-listen", config.worker_metrics_listen)
    if config.tls_files is not None:
        yield from _certificate(config, wall_clock)
    advice = "start the control plane, or correct --control-plane; a worker tries again until it is there"
    yield examine_connection(f"control plane at {config.control_plane}", config.control_plane, advice)


def _native_code(config: WorkerConfig) -> Finding:
    if config.native_code == "off":
        advice = "leave --native-code out, unless it was turned off to find a fault"
        return Finding("native code", State.WARNING, "off: a CPU serves several times slower", advice)
    if stored := stored_libraries(config.native_cache):
        return Finding("native code", State.OK, f"compiled already: {stored[0]}")
    compiler = find_compiler()
    if compiler is None:
        return Finding("native code", State.WARNING, missing_compiler(), "without it a CPU serves several times slower")
    return Finding("native code", State.OK, f"the first start compiles it, with {' '.join(compiler)}")


def _certificate(config: WorkerConfig, wall_clock: Callable[[], float]) -> Iterator[Finding]:
    what, files = "certificate of the worker", config.tls_files
    assert files is not None, "the caller looked"
    try:
        not_after_s = files.not_after_s()
    except (TlsError, ValueError) as error:
        yield Finding(what, State.WRONG, str(error), "renew it; a running worker attaches with it without a restart")
        return
    if not_after_s is not None:
        yield examine_validity(what, files.cert, not_after_s, wall_clock())
