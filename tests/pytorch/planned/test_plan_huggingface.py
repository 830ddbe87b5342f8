"""Tests of planned networks of Hugging Face with small configurations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planners import RecomputeAll
from tests.pytorch.bits import differing

transformers = pytest.importorskip("transformers")
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


pytestmark = pytest.mark.usefixtures("prices_of_plans", "nothing_left_compiled")


def gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=200, **sizes))


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=200, intermediate_size=128, **SIZES)
    return transformers.BertForMaskedLM(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=200, intermediate_size=128, **SIZES)
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(intermediate_size=128, image_size=32, patch_size=8, **SIZES)
    return transformers.ViTForImageClassification(config)


def text() -> dict[str, Tensor]:
    tokens = torch.randint(200, (4, 32))
    return {"input_ids": tokens, "labels": tokens}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(2, (4,))}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("build", "data"), [(gpt2, text), (bert, text), (llama, text), (vit, images)],
    ids=["gpt2", "bert", "llama", "vit"],
)  # fmt: skip
def test_planned_hugging_face_model_matches_pytorch(
    build: Callable[[], nn.Module], data: Callable[[], dict[str, Tensor]]
) -> None:
    def train(planned: bool) -> dict[str, Tensor]:
        torch.manual_seed(20)
        model = build().train()
        batch = data()
        runs = model
        if planned:
            plan = rekindle.plan(model, batch, budget="1GB", planner=RecomputeAll())
            runs = plan.apply()
            assert plan.overhead
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        found = {}
        for number in range(3):
            optimizer.zero_grad()
            loss = runs(**data()).loss
            loss.backward()
            optimizer.step()
            found[f"loss {number}"] = loss.detach()
        found |= {
            f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None
        }
        return found | dict(model.state_dict()) | {"generator": torch.get_rng_state()}

    assert differing(train(planned=True), train(planned=False)) == []
