"""Builds the real engine from a worker's settings: device, model, arena, KV cache, capacities."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from motet.command_line import size
from transformers.utils import logging as transformers_logging

from contract.fingerprint import checkpoint_fingerprint
from contract.hello_bounds import MAX_BLOCKS, MAX_HOST_BLOCKS
from contract.process_log import shown
from data_plane.adapters.arena.adapter_arena import AdapterArena
from data_plane.adapters.arena.slots import table_bytes
from data_plane.config import WorkerConfig
from data_plane.constraints.lanes import Lanes
from data_plane.engine.engine import TorchEngine
from data_plane.engine.host_blocks import HostBlocks
from data_plane.engine.kv_cache import KVCache, KVFormat, fitting_blocks, free_bytes_on, free_host_bytes
from data_plane.engine.native_check import check_recorded
from data_plane.engine.warm_up import warm_up
from data_plane.errors import ConfigError, UnsupportedModel
from data_plane.layers.attention import PagedAttention
from data_plane.models.limits import model_length
from data_plane.models.load_progress import logging_progress
from data_plane.models.loader import LoadedModel, load_model
from data_plane.plan import MAX_ROW_ADAPTERS, Capacities, TargetModule
from kernels import native
from kernels.launches import check_tables
from kernels.lora import choice
from kernels.tuning import TABLES

logger = logging.getLogger(__name__)

USUAL_RANK = 8


def build_engine(config: WorkerConfig, *, lanes: Lanes | None = None) -> TorchEngine:
    """An engine that serves config.model_dir (`lanes`: see TorchEngine). Raises ConfigError naming the flag to set."""
    torch.set_num_threads(config.num_threads)
    device = _device(config.device)
    _set_up_native_code(config, device)
    try:
        fingerprint = checkpoint_fingerprint(config.model_dir)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {error}") from error
    if device.type == "cuda":
        check_launches(torch.cuda.get_device_name(device))
    loaded = _load(config, device)
    config = with_arena(config, device)
    kv_format = KVFormat.of(config.kv_cache_dtype, loaded.dtype, device)
    layers = loaded.probe.attention_layers
    bytes_per_block = kv_format.block_bytes(layers, config.block_size)
    num_blocks = config.num_blocks or _num_blocks(config, loaded, device, bytes_per_block)
    num_host_blocks = _num_host_blocks(config, bytes_per_block)
    try:
        cache = KVCache(layers, num_blocks=num_blocks, block_size=config.block_size, kv_format=kv_format, device=device)
        host_blocks = HostBlocks(cache.tensors, num_host_blocks) if num_host_blocks else None
        arena = AdapterArena(
            _targets(loaded),
            num_slots=config.num_slots,
            arena_bytes=config.arena_bytes,
            dtype=loaded.dtype,
            device=device,
            base=loaded.base_weights(),
            base_fingerprint=fingerprint,
            rotary=loaded.rotary,
            num_scaled=config.max_rows * MAX_ROW_ADAPTERS,
            hidden_width=loaded.probe.hidden_width,
        )
    except RuntimeError as error:  # torch has no narrower one for a failed allocation
        raise ConfigError(
            f"--num-blocks {num_blocks}, --arena-bytes {config.arena_bytes} and --host-kv-bytes {config.host_kv_bytes} "
            f"do not fit in memory: {error}"
        ) from error
    _check_arena(arena, config.arena_bytes)
    _log_memory(num_blocks * config.block_size, num_blocks * bytes_per_block, config.arena_bytes)
    _attach_caches(loaded, cache)
    if loaded.stacked is not None:
        max_tokens = config.step_tokens(device.type)
        loaded.stacked.stack.record(arena, max_tokens=max_tokens, rotary_half=loaded.stacked.rotary_half)
        check_recorded(loaded, loaded.stacked, cache, max_tokens)
    if loaded.has_native_linears():
        # Torch has little left to compute, and its threads wait by spinning, which takes cores from native threads.
        torch.set_num_threads(1)
    elif device.type == "cpu" and config.arena_bytes and native.has_native():
        choice.prepare(loaded.dtype)
    capacities = Capacities(
        model_fingerprint=fingerprint,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_rows=config.max_rows,
        max_step_tokens=config.step_tokens(device.type),
        arena_bytes=config.arena_bytes,
        num_slots=config.num_slots,
        max_model_len=model_length(config.max_model_len, loaded.context_limit, num_blocks, config.block_size),
        vocab_size=loaded.probe.vocab_size,
        num_host_blocks=num_host_blocks,
        max_adapter_model_len=_adapter_length(config, num_blocks),
        target_modules=tuple(loaded.probe.targets),
        hidden_width=loaded.probe.hidden_width,
    )
    engine = TorchEngine(loaded, cache, arena, capacities, host_blocks, speculative=config.speculative, lanes=lanes)
    if config.warms_up(device.type):
        try:
            warm_up(engine)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"no memory for a step beside {num_blocks} KV blocks; lower --num-blocks: {error}"
            ) from error
    return engine


def _attach_caches(loaded: LoadedModel, cache: KVCache) -> None:
    for index, layer in enumerate(loaded.probe.attention_layers):
        PagedAttention(
            loaded.context,
            cache.keys[index],
            cache.values[index],
            cache.key_scales[index],
            cache.value_scales[index],
        ).attach(layer.module)


def _set_up_native_code(config: WorkerConfig, device: torch.device) -> None:
    """Compile the C for the CPU before any request could wait for it."""
    settings = native.settings()
    is_off = settings.is_off or config.native_code == "off"
    native.configure(native.NativeSettings(is_off=is_off, cache_folder=config.native_cache or settings.cache_folder))
    native.set_num_threads(config.num_threads)
    if config.native_code != "off" and device.type == "cpu":
        logger.info("preparing native code", extra=shown("preparing native code, compiled at the first start"))
        native.library()


def _load(config: WorkerConfig, device: torch.device) -> LoadedModel:
    weights_bytes = sum(file.stat().st_size for file in config.model_dir.glob("*.safetensors"))
    sentence = f"loading {size(weights_bytes)} of weights for {device.type}"
    logger.info("loading weights size_bytes=%d device=%s", weights_bytes, device, extra=shown(sentence))
    kv_tokens = config.num_blocks * config.block_size if config.num_blocks is not None else None
    started_s = time.perf_counter()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # stderr is for the log
    with logging_progress(logger):
        loaded = load_model(
            config.model_dir,
            config.dtype,
            device,
            max_step_tokens=config.step_tokens(device.type),
            max_model_len=config.max_model_len,
            max_adapter_model_len=config.max_adapter_model_len,
            kv_tokens=kv_tokens,
        )
    time_s = time.perf_counter() - started_s
    logger.info("model ready time_s=%.1f", time_s, extra=shown(f"weights loaded and model checked in {time_s:.1f} s"))
    return loaded


def with_arena(
    config: WorkerConfig, device: torch.device, free_bytes: Callable[[], int] = free_host_bytes
) -> WorkerConfig:
    """The configuration with the bytes of the arena, where a share of free memory is given. Call it after loading."""
    if config.arena_memory_share is None:
        return config
    arena_bytes = int(free_bytes_on(device, free_bytes) * config.arena_memory_share)
    logger.info("arena share=%g arena_bytes=%d", config.arena_memory_share, arena_bytes)
    return replace(config, arena_bytes=arena_bytes, arena_memory_share=None)


def _log_memory(num_tokens: int, kv_bytes: int, arena_bytes: int) -> None:
    sentence = f"KV cache for {num_tokens} tokens: {size(kv_bytes)}; adapters: {size(arena_bytes)}"
    logger.info(
        "memory kv_tokens=%d kv_bytes=%d arena_bytes=%d", num_tokens, kv_bytes, arena_bytes, extra=shown(sentence)
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: torch finds no CUDA device; use --device cpu")
    return torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")


def check_launches(device_name: str, folder: Path = TABLES) -> None:
    """Refuse tables with launch parameters that an op cannot run with, before a step uses them."""
    try:
        check_tables(device_name, folder)
    except ValueError as error:
        raise ConfigError(f"launch parameters of {device_name}: {error}") from error


def _targets(loaded: LoadedModel) -> list[TargetModule]:
    targets = loaded.targets()
    if not targets:
        raise UnsupportedModel(
            f"model type {loaded.model.config.model_type}: no linear layer that adapters could target"
        )
    return targets


def _check_arena(arena: AdapterArena, arena_bytes: int) -> None:
    """Raises ConfigError for an arena that no adapter fits. 0 bytes are allowed: only the base model is served."""
    if not arena_bytes:
        logger.warning("--arena-bytes is 0: this worker serves the base model and no adapter")
        return
    least, usual = arena.least_adapter_bytes, arena.adapter_bytes(USUAL_RANK)
    if arena_bytes < least:
        raise ConfigError(
            f"--arena-bytes: {arena_bytes} bytes hold no adapter: the smallest takes {least} bytes, one of rank "
            f"{USUAL_RANK} on every linear layer {usual}; give that for every adapter of a batch, or 0 for none"
        )
    if arena_bytes < usual:
        logger.warning(
            "--arena-bytes %d is less than one adapter of rank %d on every linear layer takes, %d bytes: such adapters "
            "are refused",
            arena_bytes,
            USUAL_RANK,
            usual,
        )


def _num_blocks(config: WorkerConfig, loaded: LoadedModel, device: torch.device, bytes_per_block: int) -> int:
    """Blocks if --num-blocks is not given: what fits, at most what all rows of the longest context can use."""
    length = max(config.max_model_len or loaded.context_limit, config.max_adapter_model_len or 0)
    return fitting_blocks(
        bytes_per_block,
        arena_bytes=config.arena_bytes,
        table_bytes=table_bytes(loaded.targets(), config.num_slots, config.max_rows * MAX_ROW_ADAPTERS),
        host_kv_bytes=config.host_kv_bytes,
        device=device,
        most=min(config.max_rows * -(-length // config.block_size), MAX_BLOCKS),
    )


def _adapter_length(config: WorkerConfig, num_blocks: int) -> int:
    """Longest context of adapters with a rotary embedding of their own; 0: that of all requests."""
    length, held = config.max_adapter_model_len, num_blocks * config.block_size
    if length is None:
        return 0
    if length > held:
        raise ConfigError(
            f"--max-adapter-model-len: {length} is above the {held} tokens of {num_blocks} KV blocks; raise "
            "--num-blocks"
        )
    return length


def _num_host_blocks(config: WorkerConfig, bytes_per_block: int) -> int:
    """Blocks that --host-kv-bytes holds."""
    num_blocks = config.host_kv_bytes // bytes_per_block
    if config.host_kv_bytes and not num_blocks:
        raise ConfigError(
            f"--host-kv-bytes: {config.host_kv_bytes} bytes hold no KV block of {bytes_per_block}; give more, or 0 "
            "for no swapping"
        )
    if num_blocks > MAX_HOST_BLOCKS:
        raise ConfigError(
            f"--host-kv-bytes: {config.host_kv_bytes} bytes hold {num_blocks} KV blocks of {bytes_per_block}, at most "
            f"{MAX_HOST_BLOCKS} may be; give {MAX_HOST_BLOCKS * bytes_per_block} or less, or raise --block-size"
        )
    return num_blocks
