"""What a real worker reports of a real model decides what is registered, and what is registered loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from control_plane.errors import InvalidAdapter
from control_plane.fleet.gate.hello import check_hello
from control_plane.fleet.workers.reports import report_of
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.served_modules import ModuleKind, Modules
from control_plane.registry.peft.ingest import CONFIG_FILE, WEIGHTS_FILE, PackedInfo
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.wire import encode_hello
from tests.control_plane.registry.rig import pack
from tests.data_plane.engine.packing import PackedAdapter
from tests.data_plane.engine.test_oracle import worker_config
from tests.makers import ARCHS, make_adapter, make_checkpoint


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def reported_by(engine: TorchEngine, base_model: BaseModel) -> Modules:
    hello = encode_hello(engine.capacities, "w0").hello
    check_hello(hello, base_model)
    return report_of(hello).modules


def register(directory: Path, base_model: BaseModel, modules: Modules) -> tuple[PackedInfo, list[bytes]]:
    files = {name: directory / name for name in (CONFIG_FILE, WEIGHTS_FILE)}
    return pack(files, base_model, reported=modules, max_adapter_bytes=1 << 24)


@pytest.mark.parametrize("arch", ARCHS)
def test_an_adapter_on_all_that_is_reported_registers_and_loads(arch: str, tmp_path: Path) -> None:
    """What the checkpoint's headers say before a worker attaches is what the worker serves, and the digest the same."""
    checkpoint = make_checkpoint(tmp_path / "model", arch)
    base_model, engine = BaseModel.load(checkpoint), build_engine(worker_config(checkpoint))
    modules = reported_by(engine, base_model)
    mixtures = (ModuleKind.EXPERT, ModuleKind.ROUTER)  # of these, the headers say nothing
    served = {name for name, module in modules.items() if not module.reason and module.kind not in mixtures}
    assert served == base_model.linear_shapes.keys() | base_model.embedding_modules.keys()
    adapter = make_adapter(tmp_path / "adapter", checkpoint, rank=3)
    info, chunks = register(adapter, base_model, modules)
    assert info.digest == register(adapter, base_model, {})[0].digest
    packed = PackedAdapter(info.digest, info.manifest, chunks)
    engine.slots.load(0, 1, info.digest, packed)
    assert engine.slots.used_bytes() == info.arena_bytes


def test_an_adapter_on_a_router_registers_once_a_worker_reported_it(tmp_path: Path) -> None:
    """The router's weight looks like a linear's in the checkpoint; whether an adapter fits only a worker knows."""
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3_moe")
    base_model, engine = BaseModel.load(checkpoint), build_engine(worker_config(checkpoint))
    adapter = make_adapter(tmp_path / "adapter", checkpoint, rank=3, target_parameters=["mlp.gate.weight"])
    with pytest.raises(InvalidAdapter, match=r"mlp\.gate.*start one"):
        register(adapter, base_model, {})
    info, chunks = register(adapter, base_model, reported_by(engine, base_model))
    assert "model.layers.1.mlp.gate" in info.target_modules
    engine.slots.load(0, 1, info.digest, PackedAdapter(info.digest, info.manifest, chunks))


def test_an_adapter_on_a_router_that_takes_none_is_refused_with_the_workers_reason(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3_moe")
    base_model, engine = BaseModel.load(checkpoint), build_engine(worker_config(checkpoint))
    adapter = make_adapter(tmp_path / "adapter", checkpoint, rank=3)
    add_module(adapter, "model.layers.1.mlp.gate", rank=3, in_features=64, out_features=4)
    modules = reported_by(engine, base_model)
    router = dataclasses.replace(modules["model.layers.1.mlp.gate"], reason="its class uses its weight twice")
    with pytest.raises(InvalidAdapter, match=r"mlp\.gate takes no adapters: its class uses"):
        register(adapter, base_model, {**modules, "model.layers.1.mlp.gate": router})


def add_module(adapter: Path, name: str, *, rank: int, in_features: int, out_features: int) -> None:
    tensors: dict[str, Any] = load_file(adapter / WEIGHTS_FILE)
    tensors[f"base_model.model.{name}.lora_A.weight"] = np.ones((rank, in_features), np.float32)
    tensors[f"base_model.model.{name}.lora_B.weight"] = np.ones((out_features, rank), np.float32)
    save_file(tensors, adapter / WEIGHTS_FILE)
