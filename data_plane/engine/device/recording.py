"""Records an engine's decode steps as CUDA graphs before it serves, where its model and settings allow it."""

from __future__ import annotations

import logging

import torch

from contract.process_log import shown
from data_plane.config import WorkerConfig
from data_plane.engine.device.step_graphs import CudaRecorder, Recorder
from data_plane.engine.engine import TorchEngine
from data_plane.errors import ConfigError
from data_plane.layers.lora_experts import LoraExperts
from kernels.devices import has_triton

logger = logging.getLogger(__name__)

# What KV blocks leave for graphs. They share one pool, as large as the largest step that is recorded.
GRAPH_BYTES = 512 << 20
# Major compute capabilities on which torch groups products in bfloat16 without the host.
GROUPED_ON_DEVICE = (9, 10)


def check_graphs(config: WorkerConfig, device_type: str) -> None:
    """Raise ConfigError where --cuda-graphs names numbers of rows that cannot be recorded, before a model is loaded."""
    reason = _device_against(device_type)
    if config.graph_sizes(device_type) and config.cuda_graphs != "auto" and reason is not None:
        raise _refusal(config, reason)


def record_graphs(engine: TorchEngine, config: WorkerConfig, recorder: Recorder | None = None) -> bool:
    """Record what --cuda-graphs names; whether anything was recorded. `recorder`: None for CUDA's.

    With "auto" an engine that cannot be recorded goes on without graphs, and the reason is logged. Raises ConfigError
    where numbers of rows are named and cannot be recorded, and where there is no memory.
    """
    device_type = engine.kv_cache.keys[0].device.type
    sizes = config.graph_sizes("cuda" if recorder is not None else device_type)
    if not sizes:
        return False
    reason = _device_against(device_type if recorder is None else "cuda") or _model_against(engine)
    if reason is None:
        try:
            logger.info("recording graphs", extra=shown("recording the steps that decode"))
            engine.decode_steps.record(recorder or CudaRecorder(), sizes, has_adapters=config.arena_bytes > 0)
            return True
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"--cuda-graphs {config.cuda_graphs}: no memory to record them; lower --memory-utilization, or give "
                f"--cuda-graphs off: {error}"
            ) from error
        except RuntimeError as error:  # torch has no narrower one for what cannot be captured
            reason = f"a step of this model cannot be recorded: {error}"
    if config.cuda_graphs != "auto":
        raise _refusal(config, reason)
    logger.warning("decode steps are not recorded as CUDA graphs: %s", reason)
    return False


def _device_against(device_type: str) -> str | None:
    """Why no step is recorded on such a device; None: nothing is against it."""
    if device_type != "cuda":
        return "there is no CUDA device"
    if not has_triton():
        return "triton is not installed"
    return None


def _model_against(engine: TorchEngine) -> str | None:
    device = engine.kv_cache.keys[0].device
    experts = next((each for each in engine.model.model.modules() if isinstance(each, LoraExperts)), None)
    if experts is None or device.type != "cuda":
        return None
    return experts_against(experts.dtype, torch.cuda.get_device_capability(device))


def experts_against(dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why steps with grouped products of this dtype are not recorded; None: they are.

    Elsewhere torch's grouped_mm reads the sizes of the groups on the host (ATen/native/GroupedMMUtils.h).
    """
    if dtype == torch.bfloat16 and capability[0] in GROUPED_ON_DEVICE:
        return None
    name = str(dtype).removeprefix("torch.")
    device = f"a device of compute capability {capability[0]}.{capability[1]}"
    return f"on {device}, products of experts in {name} need the host"


def _refusal(config: WorkerConfig, reason: str) -> ConfigError:
    return ConfigError(f"--cuda-graphs {config.cuda_graphs}: {reason}; give --cuda-graphs off")
