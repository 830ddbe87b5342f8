"""Tests of a training step of zoo models in other settings: equal bits within a budget.

The settings are adapters, checkpointing, tied or frozen weights, attention kernels, autocast, and
batches of changing length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import batches
from tests.zoo.architectures import architecture, from_transformers, loss_of
from tests.zoo.batches import SENTENCES, WORDS
from tests.zoo.language import GROUPED, OLD, PLAIN, T5
from tests.zoo.runs import Program, Row, compare, step_of, training_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # warnings of the networks themselves
]

Change = Callable[[nn.Module], nn.Module]
LANGUAGE: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("ForCausalLM", OLD),
    "llama": ("ForCausalLM", GROUPED | {"num_hidden_layers": 3}),
    "bert": ("ForMaskedLM", PLAIN),
    "t5": ("ForSeq2SeqLM", T5),
}
each_language = pytest.mark.parametrize("name", LANGUAGE)


def _built(name: str, change: Change = lambda model: model, **settings: Any) -> nn.Module:
    head, small = LANGUAGE[name]
    torch.manual_seed(20)
    return change(from_transformers(name, head, {**small, **settings})).train()


def _trained(name: str, change: Change = lambda model: model, **settings: Any) -> Program:
    def build() -> Callable[[], Any]:
        model = _built(name, change, **settings)
        batch = batches.translation() if name == "t5" else batches.text()
        return step_of(model, lambda: loss_of(model(**batch)))

    return build


def _assert_same(row: Row) -> None:
    assert (row.unstable, row.differing) == ((), ())
    assert row.peak <= row.budget
    assert row.recomputations > 0


@pytest.mark.parametrize("reentrant", [False, True])
@each_language
def test_zoo_model_with_gradient_checkpointing_matches_pytorch(name: str, reentrant: bool) -> None:
    """The checkpoint itself recomputes values, so a budget can evict fewer of them."""

    def checkpointed(model: nn.Module) -> nn.Module:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    row = compare(_trained(name, checkpointed), fraction=0.7)
    assert (row.unstable, row.differing) == ((), ())
    assert row.peak <= row.budget <= row.plain_peak


@each_language
def test_zoo_model_with_lora_matches_pytorch(name: str) -> None:
    def adapted(model: nn.Module) -> nn.Module:
        import peft

        targets = {"gpt2": ["c_attn"], "bert": ["query", "value"], "t5": ["q", "v"]}
        settings = peft.LoraConfig(
            r=4,
            lora_dropout=0.1,
            target_modules=targets.get(name, ["q_proj", "v_proj"]),
            fan_in_fan_out=name == "gpt2",
        )
        return peft.get_peft_model(model, settings)

    _assert_same(compare(_trained(name, adapted)))


def test_zoo_model_with_lora_and_checkpointing_matches_pytorch() -> None:
    def adapted(model: nn.Module) -> nn.Module:
        import peft

        model.activation_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))

    row = compare(_trained("llama", adapted), fraction=0.7)
    assert (row.unstable, row.differing) == ((), ())
    assert row.peak <= row.budget <= row.plain_peak


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("tied", [False, True])
def test_zoo_model_with_tied_embeddings_matches_pytorch(name: str, tied: bool) -> None:
    def check(model: nn.Module) -> nn.Module:
        inside, outside = model.get_input_embeddings(), model.get_output_embeddings()
        assert (inside.weight is outside.weight) == tied
        return model

    _assert_same(compare(_trained(name, check, tie_word_embeddings=tied)))


@each_language
def test_zoo_model_with_frozen_parameters_matches_pytorch(name: str) -> None:
    """All weight matrices are frozen: only vectors train, such as biases and norm weights."""

    def frozen(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
        return model

    _assert_same(compare(_trained(name, frozen)))


def test_zoo_model_with_frozen_first_layers_matches_pytorch() -> None:
    def frozen(model: nn.Module) -> nn.Module:
        for parameter in model.model.layers[:2].parameters():
            parameter.requires_grad_(False)
        model.model.embed_tokens.requires_grad_(False)
        return model

    row = compare(_trained("llama", frozen), fraction=0.5)
    assert (row.unstable, row.differing) == ((), ())
    assert row.peak <= row.budget


@each_language
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_zoo_model_with_each_attention_kernel_matches_pytorch(
    name: str, implementation: str
) -> None:
    def chosen(model: nn.Module) -> nn.Module:
        model.set_attn_implementation(implementation)
        return model

    _assert_same(compare(_trained(name, chosen)))


@each_language
def test_zoo_model_under_autocast_matches_pytorch(name: str) -> None:
    def build() -> Callable[[], Any]:
        model = _built(name)
        batch = batches.translation() if name == "t5" else batches.text()

        def loss() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss_of(model(**batch))

        return step_of(model, loss)

    _assert_same(compare(build))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_zoo_model_with_new_length_each_step_matches_pytorch(name: str) -> None:
    """Twenty steps within one budget, whose batches have sentences of 8 to 55 words."""

    def build() -> Callable[[], Any]:
        model = _built(name)
        lengths = torch.randint(8, 56, (20,)).tolist()
        data = [torch.randint(4, WORDS, (SENTENCES, length)) for length in lengths]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> Any:
            losses = []
            for words in data:
                optimizer.zero_grad()
                loss = loss_of(model(input_ids=words, labels=words))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return losses, model, list(optimizer.state.values())

        return step

    _assert_same(compare(build))


def test_zoo_comparison_reports_small_difference_in_one_result() -> None:
    """The test's model computes something slightly different while a budget is active."""
    from rekindle import budget

    def build() -> Callable[[], Any]:
        model, batch = architecture("", "gpt2", "ForCausalLM", batches.text, OLD).build()
        more = 1e-6 if budget._active is not None else 0.0

        def loss() -> Tensor:
            return loss_of(model(**batch)) + (1e-3 if budget._active is not None else more)

        return step_of(model, loss)

    row = compare(build)
    assert row.unstable == ()
    assert row.differing == ("result[0]",)
    assert not row.equal


def test_training_step_of_zoo_model_changes_its_weights() -> None:
    chosen = architecture("", "gpt2", "ForCausalLM", batches.text, OLD)
    _, model = training_step(chosen)()()
    torch.manual_seed(20)
    fresh, _ = chosen.build()
    pairs = zip(model.parameters(), fresh.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)
