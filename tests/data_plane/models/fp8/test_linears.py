"""Which device and dtype take FP8 weights, and when a norm's FP8 rows are not trusted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from data_plane.errors import ConfigError
from data_plane.layers.context import StepContext
from data_plane.layers.decoder_layer import DecoderLayer
from data_plane.layers.fp8.activations import Fp8Activations
from data_plane.layers.lora_linear import LoraLinear
from data_plane.layers.rms_norm import RmsNorm
from data_plane.models.fp8 import refusals
from data_plane.models.fp8.linears import quantize_linears
from data_plane.models.fp8.refusals import check_device, check_dtype
from kernels.fp8 import Fp8Rows

CUDA = torch.device("cuda", 0)


class Layer(nn.Module):
    """A norm and a linear, and what happens to the norm's result between them. Also a head and another linear."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.plain, self.head = nn.Linear(32, 32), nn.Linear(32, 64)
        self.norm = RmsNorm(nn.Parameter(torch.ones(32)), 1e-5, 0.0)
        linear = nn.Linear(32, 16, bias=False).requires_grad_(False)
        self.linear = LoraLinear([linear], ["linear"], StepContext())
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(self.between(self.norm(x)))
        return output

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def get_input_embeddings(self) -> None:
        return None


@pytest.mark.parametrize("shape", [(3, 32), (1, 3, 32)], ids=["rows", "a batch of one"])
@pytest.mark.parametrize(
    ("between", "is_trusted"),
    [
        (lambda x: x, True),
        (lambda x: x.view(-1, 32), True),  # the same rows, as a mixture of experts hands them to its shared expert
        (lambda x: x[..., :1, :].expand(x.shape), False),  # other rows that begin in the same memory
        (lambda x: x + 1, False),  # another tensor: nobody reads the rows
        (lambda x: x.mul_(2), False),  # the same tensor with other values
    ],
    ids=["as it is", "a view", "a row alone", "a copy", "changed in place"],
)
def test_rows_are_written_only_for_a_tensor_that_a_linear_reads_as_it_is(
    between: Any, is_trusted: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    layer: Any = Layer(between)
    x = torch.randn(shape)
    with torch.inference_mode():
        expected = layer(x)
        quantize_linears(layer, lambda: layer(x))
        assert (layer.norm.fp8 is not None) == is_trusted
        assert (layer(x) - expected).norm() < 0.05 * expected.norm()


class Part(nn.Module):
    """An attention or an MLP as transformers has them: it takes [1, T, n]. Attentions return a pair."""

    def __init__(self, *, is_attention: bool) -> None:
        super().__init__()
        self.linear = LoraLinear([nn.Linear(32, 32, bias=False).requires_grad_(False)], ["linear"], StepContext())
        self.is_attention = is_attention

    def forward(self, hidden_states: torch.Tensor) -> Any:
        assert hidden_states.dim() == 3
        output = self.linear(hidden_states)
        return (output, None) if self.is_attention else output


class Decoder(Layer):
    """A fused layer whose attention and MLP are not fused."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        norms = [RmsNorm(nn.Parameter(torch.ones(32)), 1e-5, 0.0) for _ in range(2)]
        self.layer = DecoderLayer(Part(is_attention=True), Part(is_attention=False), *norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output


def test_norms_of_a_fused_layer_write_rows_for_parts_that_are_not_fused() -> None:
    model: Any = Decoder()
    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        quantize_linears(model, lambda: model(x.clone()))
    assert all(norm.fp8 is not None for norm in (model.layer.input_layernorm, model.layer.post_attention_layernorm))


def test_linears_that_are_not_ours_stay_as_they_are_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    layer: Any = Layer(lambda x: x)
    with caplog.at_level("WARNING"), torch.inference_mode():
        quantize_linears(layer, lambda: layer(torch.ones(1, 32)))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("is given: no adapter can target them: plain")
    assert type(layer.plain) is nn.Linear and layer.plain.weight.dtype == torch.float32


def test_a_weight_is_freed_and_read_through_its_codes() -> None:
    linears = [nn.Linear(32, out, bias=False).requires_grad_(False) for out in (16, 32)]
    joint = LoraLinear(linears, ["one", "two"], StepContext())
    joint.quantize_weight(Fp8Activations())
    assert joint.weight.is_meta and joint.weight.shape == (48, 32)
    for index, linear in enumerate(linears):
        rows = joint.target_weight(index)
        assert isinstance(rows, Fp8Rows) and rows.shape == linear.weight.shape
        assert (rows.float() - linear.weight).abs().max() <= linear.weight.abs().max() / 16


@pytest.mark.parametrize("device", [torch.device("cpu"), CUDA, torch.device("mps")], ids=str)
def test_only_gpus_of_nvidia_take_fp8_weights(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    check_device("none", device)
    with pytest.raises(ConfigError, match=f"--quantization fp8: {device.type} multiplies no FP8 weights"):
        check_device("fp8", device)


def test_a_gpu_from_8_9_on_takes_fp8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    capabilities = {91: (8, 0), 92: (8, 9), 93: (9, 0)}  # by the device's number: what a device can do is kept
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.get)
    products: list[int | None] = []
    monkeypatch.setattr(refusals, "compute_product", lambda device: products.append(device.index))
    for index in (92, 93):
        check_device("fp8", torch.device("cuda", index))
    check_device("none", torch.device("cuda", 93))
    assert products == [92, 93]
    with pytest.raises(
        ConfigError, match=r"NVIDIA A100 has compute capability 8\.0, FP8 weights need at least 8\.9; give --quant"
    ):
        check_device("fp8", torch.device("cuda", 91))


def test_a_torch_without_the_product_is_refused_before_a_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch says it for a device that it was not built for."""

    def no_product(_: torch.device) -> None:
        raise RuntimeError("Rowwise scaling is not currently supported on your device\nException raised from ...")

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(refusals, "compute_product", no_product)
    with pytest.raises(ConfigError) as refused:
        check_device("fp8", torch.device("cuda", 94))
    assert str(refused.value) == (
        f"--quantization fp8: torch {torch.__version__} has no product of FP8 rows for NVIDIA L4: Rowwise scaling is "
        "not currently supported on your device; give --quantization none"
    )


def test_the_product_that_is_tried_is_one_that_a_gpu_takes() -> None:
    """On a CPU the definition computes it, after the same checks of sizes and dtypes."""
    refusals.compute_product(torch.device("cpu"))


def test_a_gpu_serves_fp8_weights_in_bfloat16_alone() -> None:
    check_dtype("fp8", torch.bfloat16, CUDA)
    check_dtype("none", torch.float16, CUDA)
    with pytest.raises(ConfigError, match="served in float16; give --dtype bfloat16"):
        check_dtype("fp8", torch.float16, CUDA)
