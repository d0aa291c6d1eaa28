"""What the control plane knows of the base checkpoint: sizes, end-of-sequence ids, and the shape of every linear.

Reads config.json, generation_config.json and safetensors headers; never weights, never torch. Linears carry the module
paths of transformers' AutoModelForCausalLM, which is what PEFT's keys hold after "base_model.model.". They are what
registration goes by before a worker has reported the modules of the loaded model (target_modules.py).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.checkpoints.quantization import TWICE_QUANTIZED, NotServed, read_quantization
from contract.context_length import config_context_length
from contract.fingerprint import NOT_QUANTIZED, checkpoint_fingerprint, served_fingerprint
from contract.packed_layout import ITEMSIZE
from control_plane.registry.model.embedding_modules import CheckpointTensor, EmbeddingModule, find_embedding_modules
from control_plane.registry.model.quantized_shapes import quantized_shapes

logger = logging.getLogger(__name__)

DTYPES = tuple(ITEMSIZE)
MAX_CHECKPOINT_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself

# Where the decoder layers hang in the module tree; every other model type: "model.layers".
_LAYERS_PATH = {
    "gpt2": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
    "phi": "model.layers",
    "falcon": "transformer.h",
    "bloom": "transformer.h",
    "gptj": "transformer.h",
    "gpt_bigcode": "transformer.h",
    "codegen": "transformer.h",
    "mpt": "transformer.blocks",
}
# These keep the weights of their linears transposed.
_TRANSPOSED_TYPES = {"gpt2"}
# What checkpoints call layers. The part before differs if a model was saved without its head or taken out of another.
_LAYER_TENSOR = re.compile(r"^(?P<path>(?:[a-z_0-9]+\.)*?(?:layers|h|blocks))\.(?P<index>\d+)\.(?P<module>.+)\.weight$")
_FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}
# Last part of the name of a router's weight, which transformers holds as a parameter, not as a linear.
ROUTER_NAMES = {"gate", "router", "wg"}


class BaseModelError(ValueError):
    """The checkpoint directory cannot be served. For the operator: names files."""


@dataclass(frozen=True)
class BaseModel:
    """One base checkpoint."""

    name: str  # last part of the directory's name
    fingerprint: str  # 64 lower-case hexadecimal digits
    dtype: str  # element type it is served in: "float32", "bfloat16" or "float16"
    config: dict[str, Any]  # config.json
    vocab_size: int  # tokens
    max_model_len: int | None  # longest context by the checkpoint or the operator, tokens; None: neither names one
    eos_token_ids: tuple[int, ...]  # of generation_config.json, else of config.json
    linear_shapes: dict[str, tuple[int, int]]  # of the decoder layers: module path -> (out_features, in_features)
    embedding_modules: dict[str, EmbeddingModule]  # the embedding and the head, by module path
    num_layers: int  # decoder layers
    model_dir: Path
    tensors: dict[str, CheckpointTensor] = field(default_factory=dict, repr=False)  # the floating-point ones
    tokenizer_file: Path | None = None  # its tokenizer.json, or one that was converted; None: there is none
    quantization: str = NOT_QUANTIZED  # how workers hold its linears, of contract.fingerprint

    @property
    def served_fingerprint(self) -> str:
        """Names what computes the tokens: other numbers than the checkpoint's own if they are quantised."""
        return served_fingerprint(self.fingerprint, self.quantization)

    @classmethod
    def load(
        cls, model_dir: Path, dtype: str = "auto", max_model_len: int | None = None, quantization: str = NOT_QUANTIZED
    ) -> BaseModel:
        """Read the checkpoint's metadata. Raises BaseModelError with what is wrong and what to do."""
        config = _read_json(model_dir / "config.json", is_required=True)
        try:
            how = read_quantization(config)
        except NotServed as refusal:
            raise BaseModelError(f"{model_dir}/config.json: {refusal}") from refusal
        if how is not None and quantization != NOT_QUANTIZED:
            raise BaseModelError(f"--quantization {quantization}: {TWICE_QUANTIZED}")
        tensors, shapes = _tensors(model_dir)
        if how is not None:
            _check_quantized(model_dir, shapes.keys() - tensors.keys())
        linear_shapes, num_layers = _linears(config, shapes)
        try:
            fingerprint = checkpoint_fingerprint(model_dir)
        except (OSError, ValueError) as error:
            raise BaseModelError(f"cannot fingerprint {model_dir}: {error}") from error
        return cls(
            name=model_dir.resolve().name,
            fingerprint=fingerprint,
            dtype=_resolve_dtype(config, dtype),
            config=config,
            vocab_size=_vocab_size(config, model_dir),
            max_model_len=_max_model_len(config, max_model_len),
            eos_token_ids=_eos_token_ids(config, _read_json(model_dir / "generation_config.json", is_required=False)),
            linear_shapes=linear_shapes,
            embedding_modules=find_embedding_modules(config, tensors, layers_path(config)) if linear_shapes else {},
            num_layers=num_layers,
            model_dir=model_dir,
            tensors=tensors,
            quantization=quantization,
        )


def _read_json(path: Path, *, is_required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not is_required:
            return {}
        raise BaseModelError(f"{path} is missing; name a Hugging Face checkpoint directory") from error
    except (OSError, ValueError) as error:
        raise BaseModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise BaseModelError(f"{path} holds {type(value).__name__}, an object is expected")
    return value


def layers_path(config: dict[str, Any]) -> str:
    """Where the decoder layers hang in the module tree."""
    return _LAYERS_PATH.get(str(config.get("model_type", "")), "model.layers")


def _tensors(model_dir: Path) -> tuple[dict[str, CheckpointTensor], dict[str, tuple[int, ...]]]:
    """All floating-point tensors, over all shards, and the shapes of these and of quantised weights.

    The index file, where there is one, says which shards count; a shard that it names must exist.
    """
    index_path = model_dir / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = _read_json(index_path, is_required=True).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise BaseModelError(f"{index_path}: weight_map is missing or is not a map of names to files")
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise BaseModelError(f"{index_path}: weight_map names a file outside the checkpoint directory")
    else:
        names = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if not names:
        raise BaseModelError(f"{model_dir} holds no *.safetensors file; convert the checkpoint to safetensors")
    tensors: dict[str, CheckpointTensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        header, data_start = _shard_header(model_dir / name)
        for tensor, entry in header.items():
            if tensor != "__metadata__" and entry.get("dtype") in _FLOAT_DTYPES:
                shape = tuple(int(size) for size in entry["shape"])
                start = data_start + int(entry["data_offsets"][0])
                tensors[tensor] = CheckpointTensor(model_dir / name, entry["dtype"], shape, start)
        shapes |= quantized_shapes(model_dir / name, header, data_start)
    return tensors, {name: tensor.shape for name, tensor in tensors.items()} | shapes


def _check_quantized(model_dir: Path, names: Collection[str]) -> None:
    """Adapters on embedding and head are compared with the base's values, so these must be floats."""
    for name in sorted(names):
        if not _LAYER_TENSOR.match(name):
            raise BaseModelError(
                f"{model_dir}: {name} is quantised, and only linears of the decoder layers may be; quantise again and "
                "leave it out (llm_int8_skip_modules, modules_to_not_convert or ignore)"
            )


def _shard_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the data after it begins."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(MAX_CHECKPOINT_HEADER_BYTES, path.stat().st_size - 8):
                raise BaseModelError(f"{path}: header of {size} bytes does not fit the file; download it again")
            header = json.loads(file.read(size))
    except (OSError, ValueError) as error:
        if isinstance(error, BaseModelError):
            raise
        raise BaseModelError(f"cannot read {path}: {error}") from error
    if not isinstance(header, dict):
        raise BaseModelError(f"{path}: the safetensors header is not a JSON object")
    return header, 8 + size


def _linears(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, int]], int]:
    """Shapes of the decoder layers' linears by module path, and the number of layers.

    Only the part of a name before the layer's index differs between a checkpoint and the module tree (a model saved
    without its head, or taken out of a larger one), so that part is replaced by where the tree has its layers. None
    where the layers have a name that is not known, or several have layers.
    """
    model_type = str(config.get("model_type", ""))
    found = [(match, shapes[name]) for name in sorted(shapes) if (match := _LAYER_TENSOR.match(name))]
    paths = {match["path"] for match, _ in found}
    if len(paths) != 1:
        logger.info(
            "decoder layers not found by name, adapters wait for a worker model_type=%s layers_under=%s",
            model_type,
            sorted(paths),
        )
        return {}, 0
    num_layers = 1 + max(int(match["index"]) for match, _ in found)
    named = config.get("num_hidden_layers", config.get("n_layer"))
    expected = named if isinstance(named, int) else num_layers
    if expected > num_layers:
        raise BaseModelError(
            f"config.json says {expected} layers, the checkpoint holds {num_layers}; download it again"
        )
    linears: dict[str, tuple[int, int]] = {}
    for match, shape in found:
        module = match["module"]
        parts = module.split(".")
        is_linear = len(shape) == 2 and "experts" not in parts and parts[-1] not in ROUTER_NAMES
        is_linear = is_linear and not parts[-1].endswith("norm")
        if is_linear and int(match["index"]) < expected:  # layers after the last predict further tokens
            sides = (shape[1], shape[0]) if model_type in _TRANSPOSED_TYPES else (shape[0], shape[1])
            linears[f"{layers_path(config)}.{int(match['index'])}.{module}"] = sides
    return linears, expected


def _resolve_dtype(config: dict[str, Any], dtype: str) -> str:
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise BaseModelError(f"dtype {dtype!r} is not served; choose one of {', '.join(DTYPES)}")
    return dtype


def _vocab_size(config: dict[str, Any], model_dir: Path) -> int:
    text_config = config.get("text_config")
    size = config.get("vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    if not isinstance(size, int) or size < 1:
        raise BaseModelError(f"{model_dir}/config.json: vocab_size is {size!r}; only text decoders are served")
    return size


def _max_model_len(config: dict[str, Any], wanted: int | None) -> int | None:
    try:
        limit = config_context_length(config)
    except ValueError as error:
        raise BaseModelError(str(error)) from error
    if wanted is not None and limit is not None and wanted > limit:
        raise BaseModelError(f"--max-model-len {wanted} is above the model's {limit} tokens in config.json; lower it")
    return limit if wanted is None else wanted


def _eos_token_ids(config: dict[str, Any], generation_config: dict[str, Any]) -> tuple[int, ...]:
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
            return tuple(value)
    return ()
