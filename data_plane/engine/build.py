"""Builds the real engine from a worker's settings: device, model, arena, KV cache, capacities."""

from __future__ import annotations

import gc
import hashlib
import logging
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from motet.command_line import size
from transformers.utils import logging as transformers_logging

from contract.fingerprint import checkpoint_fingerprint
from contract.hello_bounds import MAX_BLOCKS, MAX_HOST_BLOCKS
from contract.process_log import shown
from data_plane.adapters.arena.adapter_arena import AdapterArena
from data_plane.adapters.arena.slots import table_bytes
from data_plane.adapters.step.side_stream import CudaSideStream
from data_plane.config import WorkerConfig
from data_plane.constraints.lanes import Lanes
from data_plane.engine.device.recording import GRAPH_BYTES, check_graphs, record_graphs
from data_plane.engine.engine import TorchEngine
from data_plane.engine.host_blocks import HostBlocks
from data_plane.engine.kv_cache import KVCache, KVFormat
from data_plane.engine.memory.device_memory import DeviceMemory, device_memory
from data_plane.engine.memory.kv_size import Demand, Measured, fitting_blocks, named_blocks
from data_plane.engine.memory.largest_step import blocks_of_largest_step, measure_largest_step
from data_plane.engine.native_check import check_recorded
from data_plane.engine.warm_up import warm_up
from data_plane.errors import ConfigError, UnsupportedModel
from data_plane.layers.attention import PagedAttention, detach
from data_plane.models.fp8.refusals import check_device
from data_plane.models.limits import model_length
from data_plane.models.load_progress import logging_progress
from data_plane.models.loader import LoadedModel, ReadWeights, load_model
from data_plane.plan import MAX_ROW_ADAPTERS, Capacities, MemoryUse, TargetModule
from kernels import native
from kernels.launches import check_tables
from kernels.lora import choice
from kernels.tuning import TABLES

logger = logging.getLogger(__name__)

USUAL_RANK = 8


def build_engine(
    config: WorkerConfig,
    *,
    lanes: Lanes | None = None,
    memory: DeviceMemory | None = None,
    read_weights: ReadWeights | None = None,
) -> TorchEngine:
    """An engine that serves config.model_dir. Raises ConfigError naming the flag to set.

    `lanes`: see TorchEngine. `memory`: that of the device if None. `read_weights`: see load_model; the
    fingerprint of a folder without weights is then that of its configuration.
    """
    torch.set_num_threads(config.num_threads)
    device = _device(config.device)
    check_device(config.quantization, device)
    check_graphs(config, device.type)
    _set_up_native_code(config, device)
    try:
        if read_weights is None or any(config.model_dir.glob("*.safetensors")):
            fingerprint = checkpoint_fingerprint(config.model_dir)
        else:
            fingerprint = hashlib.sha256((config.model_dir / "config.json").read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {error}") from error
    if device.type == "cuda":
        check_launches(torch.cuda.get_device_name(device))
    memory = memory or device_memory(device)
    loaded = _load(config, device, read_weights)
    memory.release()  # loading leaves gigabytes of separate weights that were fused
    weights_bytes = memory.own_bytes()
    config = with_arena(config, memory)
    arena = _make_arena(config, loaded, fingerprint, device)
    arena_bytes = config.arena_bytes + _table_bytes(config, loaded)
    # Zeros and pages that nothing was written to take no memory yet, on the CPU.
    unused_bytes = max(weights_bytes + arena_bytes - memory.own_bytes(), 0)
    assembly = Assembly(config, loaded, arena, fingerprint, device, lanes)
    num_blocks, measured = _size_kv(assembly, memory, unused_bytes)
    num_host_blocks = _num_host_blocks(config, assembly.bytes_per_block)
    use = MemoryUse(
        device_bytes=memory.total_bytes(),
        weights_bytes=weights_bytes,
        step_bytes=0 if measured is None else measured.step,
        kv_bytes=num_blocks * assembly.bytes_per_block,
        host_kv_bytes=num_host_blocks * assembly.bytes_per_block,
        headroom_bytes=config.memory_headroom_bytes,
        pinned_bytes=config.pinned_bytes,
    )
    try:
        engine = assembly.engine(num_blocks, num_host_blocks, _lengths(config, loaded, num_blocks), use)
    except RuntimeError as error:  # torch has no narrower one for a failed allocation
        raise ConfigError(
            f"--num-blocks {num_blocks}, --arena-bytes {config.arena_bytes} and --host-kv-bytes {config.host_kv_bytes} "
            f"do not fit in memory: {error}"
        ) from error
    if config.warms_up(device.type):
        try:
            warm_up(engine, config.graph_sizes(device.type))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"no memory for a step beside {num_blocks} KV blocks; lower --num-blocks: {error}"
            ) from error
    before_bytes = memory.own_bytes()
    if record_graphs(engine, config):
        use = replace(use, graph_bytes=max(memory.own_bytes() - before_bytes, 0))
        engine.capacities = replace(engine.capacities, memory=use)
    log_memory(engine.capacities)
    return engine


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded model with its arena, which becomes an engine with any number of KV blocks."""

    config: WorkerConfig  # with the arena's bytes
    loaded: LoadedModel
    arena: AdapterArena
    fingerprint: str
    device: torch.device
    lanes: Lanes | None

    @property
    def kv_format(self) -> KVFormat:
        """How its KV is stored."""
        return KVFormat.of(self.config.kv_cache_dtype, self.loaded.dtype, self.device)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers."""
        return self.kv_format.block_bytes(self.loaded.probe.attention_layers, self.config.block_size)

    @property
    def lengths(self) -> tuple[int, int]:
        """The longest contexts of all requests and of some adapters (see Capacities), as if the KV blocks held them."""
        return self.config.max_model_len or self.loaded.context_limit, self.config.max_adapter_model_len or 0

    def engine(self, num_blocks: int, num_host_blocks: int, lengths: tuple[int, int], use: MemoryUse) -> TorchEngine:
        """An engine on a KV cache of its own. The one before it is of no use then."""
        config, loaded, device = self.config, self.loaded, self.device
        cache = KVCache(
            loaded.probe.attention_layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            kv_format=self.kv_format,
            device=device,
        )
        host_blocks = HostBlocks(cache.tensors, num_host_blocks) if num_host_blocks else None
        _attach_caches(loaded, cache)
        if loaded.stacked is not None:
            max_tokens = config.step_tokens(device.type)
            loaded.stacked.stack.record(self.arena, max_tokens=max_tokens, rotary_half=loaded.stacked.rotary_half)
            check_recorded(loaded, loaded.stacked, cache, max_tokens)
        capacities = Capacities(
            model_fingerprint=self.fingerprint,
            dtype=str(loaded.dtype).removeprefix("torch."),
            quantization=config.quantization,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_rows=config.max_rows,
            max_step_tokens=config.step_tokens(device.type),
            arena_bytes=config.arena_bytes,
            num_slots=config.num_slots,
            max_model_len=lengths[0],
            vocab_size=loaded.probe.vocab_size,
            num_host_blocks=num_host_blocks,
            max_adapter_model_len=lengths[1],
            target_modules=tuple(loaded.probe.targets),
            hidden_width=loaded.probe.hidden_width,
            memory=use,
        )
        return TorchEngine(
            loaded,
            cache,
            self.arena,
            capacities,
            host_blocks,
            speculative=config.speculative,
            lanes=self.lanes,
            side=CudaSideStream(device) if config.adapter_stream == "on" and device.type == "cuda" else None,
        )

    def let_go(self) -> None:
        """Free the KV cache of the engine that was made last, which must be gone."""
        for layer in self.loaded.probe.attention_layers:
            detach(layer.module)
        if self.loaded.stacked is not None:
            self.loaded.stacked.stack.forget()
        gc.collect()


def _size_kv(assembly: Assembly, memory: DeviceMemory, unused_bytes: int) -> tuple[int, Measured | None]:
    """The KV blocks to make, and what was measured for it.

    Blocks that are named need no measuring. On a GPU the largest step is run all the same: it compiles kernels, and
    where memory went is to be known.
    """
    config, is_gpu = assembly.config, assembly.device.type == "cuda"
    named = named_blocks(config, assembly.bytes_per_block)
    if named is not None and not is_gpu:
        return named, None
    num_blocks = blocks_of_largest_step(config.max_rows, config.step_tokens(assembly.device.type), config.block_size)
    measured = measure_largest_step(
        lambda num_blocks: assembly.engine(num_blocks, 0, assembly.lengths, MemoryUse()),
        num_blocks,
        memory,
        unused_bytes,
    )
    assembly.let_go()
    # The allocator kept what the step freed. A part of it under the KV blocks would leave too little for the next such
    # step, which needs pieces as large.
    memory.release()
    if named is not None:
        return named, measured
    demand = Demand(
        bytes_per_block=assembly.bytes_per_block,
        most_blocks=min(config.max_rows * -(-max(assembly.lengths) // config.block_size), MAX_BLOCKS),
        host_kv_bytes=0 if is_gpu else config.host_kv_bytes,
        pinned_bytes=0 if is_gpu else config.pinned_bytes,
        graph_bytes=GRAPH_BYTES if config.graph_sizes(assembly.device.type) else 0,
    )
    return fitting_blocks(measured, demand, config, is_gpu=is_gpu), measured


def log_memory(capacities: Capacities) -> None:
    """Say on one line where the memory went."""
    use = capacities.memory
    parts = {
        "weights": use.weights_bytes,
        "arena": capacities.arena_bytes,
        "step": use.step_bytes,
        "kv": use.kv_bytes,
        "host_kv": use.host_kv_bytes,
        "pinned": use.pinned_bytes,
        "graphs": use.graph_bytes,
        "headroom": use.headroom_bytes,
    }
    num_tokens = capacities.num_blocks * capacities.block_size
    used = ", ".join(f"{name.replace('_', ' ')} {size(held)}" for name, held in parts.items() if held)
    logger.info(
        "memory device_bytes=%d kv_tokens=%d %s",
        use.device_bytes,
        num_tokens,
        " ".join(f"{name}_bytes={held}" for name, held in parts.items()),
        extra=shown(f"memory of {size(use.device_bytes)}: {used}; KV cache for {num_tokens} tokens"),
    )


def _make_arena(config: WorkerConfig, loaded: LoadedModel, fingerprint: str, device: torch.device) -> AdapterArena:
    try:
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
        raise ConfigError(f"--arena-bytes: {config.arena_bytes} bytes do not fit in memory: {error}") from error
    _check_arena(arena, config.arena_bytes)
    if loaded.has_native_linears():
        # Torch has little left to compute, and its threads wait by spinning, which takes cores from native threads.
        torch.set_num_threads(1)
    elif device.type == "cpu" and config.arena_bytes and native.has_native():
        choice.prepare(loaded.dtype)
    return arena


def _table_bytes(config: WorkerConfig, loaded: LoadedModel) -> int:
    return table_bytes(loaded.targets(), config.num_slots, config.max_rows * MAX_ROW_ADAPTERS)


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
    """Compile the C for the CPU before any request could wait for it. On a GPU there is none: what few checks compute
    on the CPU takes less time in torch than a compiler does."""
    settings = native.settings()
    is_off = settings.is_off or config.native_code == "off" or device.type != "cpu"
    native.configure(native.NativeSettings(is_off=is_off, cache_folder=config.native_cache or settings.cache_folder))
    native.set_num_threads(config.num_threads)
    if config.native_code != "off" and device.type == "cpu":
        logger.info("preparing native code", extra=shown("preparing native code, compiled at the first start"))
        native.library()


def _load(config: WorkerConfig, device: torch.device, read_weights: ReadWeights | None) -> LoadedModel:
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
            quantization=config.quantization,
            read_weights=read_weights,
        )
    time_s = time.perf_counter() - started_s
    logger.info("model ready time_s=%.1f", time_s, extra=shown(f"weights loaded and model checked in {time_s:.1f} s"))
    return loaded


def with_arena(config: WorkerConfig, memory: DeviceMemory) -> WorkerConfig:
    """The configuration with the bytes of the arena, where a share of free memory is given.

    Call it after loading, when `memory` was released.
    """
    if config.arena_memory_share is None:
        return config
    arena_bytes = int(memory.free_bytes() * config.arena_memory_share)
    logger.info("arena share=%g arena_bytes=%d", config.arena_memory_share, arena_bytes)
    return replace(config, arena_bytes=arena_bytes, arena_memory_share=None)


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


def _lengths(config: WorkerConfig, loaded: LoadedModel, num_blocks: int) -> tuple[int, int]:
    """Assembly.lengths, as far as the KV blocks hold them. Raises ConfigError for lengths that were named."""
    length = model_length(config.max_model_len, loaded.context_limit, num_blocks, config.block_size)
    return length, _adapter_length(config, num_blocks)


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
