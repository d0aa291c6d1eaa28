"""Which modules take adapters, and that the others say why they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from data_plane.models.mixtures.adapters import mixture_targets
from data_plane.models.model_probe import probe_model
from data_plane.plan import TargetKind, TargetModule
from tests.data_plane.models.models import MAX_STEP_TOKENS, make_model


def targets(model_type: str, **settings: Any) -> dict[str, TargetModule]:
    return {
        target.name: target for target in probe_model(make_model(model_type, **settings), 128, MAX_STEP_TOKENS).targets
    }


def test_every_linear_the_head_and_the_embedding_are_reported_with_their_sizes() -> None:
    found = targets("llama")
    assert not any(target.reason for target in found.values())
    assert found["model.layers.1.mlp.down_proj"] == TargetModule(
        "model.layers.1.mlp.down_proj", TargetKind.LINEAR, in_features=48, out_features=32
    )
    assert found["lm_head"] == TargetModule("lm_head", TargetKind.HEAD, in_features=32, out_features=64)
    assert found["model.embed_tokens"] == TargetModule(
        "model.embed_tokens", TargetKind.EMBEDDING, in_features=64, out_features=32
    )
    assert len(found) == 2 * 7 + 2


def test_experts_and_routers_take_adapters() -> None:
    """Every product of every expert, under one name for all experts of a layer."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    found = targets("qwen3_moe", **moe)
    experts = "model.layers.0.mlp.experts.*"
    assert found[f"{experts}.down_proj"] == TargetModule(
        f"{experts}.down_proj", TargetKind.EXPERT, in_features=16, out_features=32, num_experts=4
    )
    assert found["model.layers.0.mlp.gate"] == TargetModule(
        "model.layers.0.mlp.gate", TargetKind.ROUTER, in_features=32, out_features=4
    )
    assert not found[f"{experts}.gate_proj"].reason and not found[f"{experts}.up_proj"].reason
    assert "model.layers.0.mlp.experts" not in found


class OtherExperts(Qwen3MoeExperts):
    """Experts that add what they read: not what stacked gated experts compute."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights) + hidden_states


def test_experts_that_compute_something_else_take_none() -> None:
    config = AutoConfig.for_model("qwen3_moe", hidden_size=32, num_experts=4, moe_intermediate_size=16)
    config._experts_implementation = "grouped_mm"
    for kind, takes_adapters in ((Qwen3MoeExperts, True), (OtherExperts, False)):
        experts = kind(config)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter)
        assert bool(mixture_targets(experts, "experts", reason="")) is takes_adapters


class SquaredRouter(nn.Module):
    """A router whose weight takes part in more than a product of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + self.weight.sum()


def test_a_router_that_uses_its_weight_twice_takes_none() -> None:
    router = SquaredRouter()
    (found,) = mixture_targets(router, "gate", reason="") or []
    assert "for more than one product" in found.reason
    assert type(router.weight) is nn.Parameter


def test_a_router_that_derives_from_a_linear_takes_none() -> None:
    found = targets("phimoe", num_local_experts=4, num_key_value_heads=4, sliding_window=None)
    assert "computes more than a product" in found["model.layers.0.mlp.router"].reason


def test_a_linear_behind_the_choice_of_tokens_takes_none() -> None:
    """ModernBERT's head has a linear of its own: it sees only the rows that are sampled."""
    found = targets("modernbert-decoder", layer_types=["full_attention"] * 2, global_attn_every_n_layers=1)
    assert "only the tokens whose logits are wanted" in found["lm_head.dense"].reason
    assert not found["decoder"].reason and found["decoder"].kind is TargetKind.HEAD


def test_learned_positions_take_none() -> None:
    found = targets("opt", ffn_dim=48, word_embed_proj_dim=32)
    assert "looked up" in found["model.decoder.embed_positions"].reason
    assert not found["model.decoder.embed_tokens"].reason


class Expert(nn.Module):
    """Two linears of which each takes some tokens, in an order of its own or not at all."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(width, width), nn.Linear(width, width), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[0]
        if self.how == "some":
            is_first = rows[:, 0] > 0
            output = torch.zeros_like(rows)
            output[is_first] = self.first(rows[is_first])
            output[~is_first] = self.second(rows[~is_first])
            return output[None]
        if self.how == "parts":
            return torch.cat([self.second(self.first(part)) for part in x.split(200, dim=1)], dim=1)
        if self.how == "twice":
            return self.second(self.first(self.first(x)))
        order = rows[:, 0].argsort()
        output = torch.zeros_like(rows)
        output[order] = self.first(rows[order])
        return output[None]


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("some", "only some of the tokens", "only some of the tokens"),
        ("twice", "more than once", ""),
        ("parts", "more than once", "more than once"),  # where a batch has many tokens
        ("sorted", "in an order of its own", "does not call it"),
    ],
)
def test_a_linear_that_does_not_see_each_token_once_and_in_order_takes_none(how: str, first: str, second: str) -> None:
    """An adapter's product would be added to other tokens' rows."""
    model = make_model()
    torch.manual_seed(1)
    setattr(model.get_submodule("model.layers.1"), "mlp", Expert(32, how))  # noqa: B010 - a module's attribute
    found = {target.name: target.reason for target in probe_model(model, 128, MAX_STEP_TOKENS).targets}
    assert first in found["model.layers.1.mlp.first"]
    assert found["model.layers.1.mlp.second"] == "" if second == "" else second in found["model.layers.1.mlp.second"]
    assert found["model.layers.1.self_attn.q_proj"] == ""
