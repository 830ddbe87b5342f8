"""The zoo: many architectures of the libraries transformers and diffusers, in small sizes.

Weights are random; none are downloaded. Dropout is on in every architecture that has it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.zoo import batches
from tests.zoo.batches import Batch
from tests.zoo.diffusion import DIFFUSION
from tests.zoo.language import DECODERS, ENCODERS, MIXTURES, SEQ2SEQ, STATE_SPACES
from tests.zoo.perception import CLASSIFIERS, MULTIMODAL, SEQUENCES, SPEECHES, VISIONS

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True)
class Architecture:
    """A network and a batch. `build` seeds all generators, so each call returns equal values."""

    name: str
    family: str
    build_seeded: Callable[[], tuple[nn.Module, Batch]]

    def build(self) -> tuple[nn.Module, Batch]:
        torch.manual_seed(20)
        np.random.seed(20)  # noqa: NPY002 - models such as wav2vec2 draw masks from it
        random.seed(20)
        return self.build_seeded()


def loss_of(output: Any) -> Tensor:
    """Return the loss that the model computed, or a loss of all its results."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss.mean()
    parts = [part.float().square().mean() for part in _with_gradient(output)]
    assert parts, f"{type(output).__name__} holds nothing with a gradient"
    return torch.stack(parts).sum()


def _with_gradient(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [part for item in value for part in _with_gradient(item)]


def from_transformers(model_type: str, head: str, settings: Mapping[str, Any]) -> nn.Module:
    """Return the class `head`, or the class `AutoModel<head>`, with random weights."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **settings)
    if head and not head.startswith("For"):
        return getattr(transformers, head)(config).train()
    return getattr(transformers, f"AutoModel{head}").from_config(config).train()


def from_diffusers(kind: str, settings: Mapping[str, Any]) -> nn.Module:
    """Return the class `kind` with random weights."""
    import diffusers

    return getattr(diffusers, kind)(**settings).train()


def architecture(
    family: str, model_type: str, head: str, batch: Callable[[], Batch], settings: Mapping[str, Any]
) -> Architecture:
    """Describe an architecture of the library transformers."""
    return Architecture(
        f"{model_type} {head}".strip(),
        family,
        lambda: (from_transformers(model_type, head, settings), batch()),
    )


def _languages() -> list[Architecture]:
    tables = [
        ("decoder", "ForCausalLM", batches.text, DECODERS),
        ("mixture of experts", "ForCausalLM", batches.text, MIXTURES),
        ("state space", "ForCausalLM", batches.short_text, STATE_SPACES),
        ("encoder", "ForMaskedLM", batches.padded_text, ENCODERS),
        ("encoder-decoder", "ForSeq2SeqLM", batches.translation, SEQ2SEQ),
        ("vision", "ForImageClassification", batches.picture(), CLASSIFIERS),
    ]
    return [
        architecture(family, model_type, head, batch, settings)
        for family, head, batch, table in tables
        for model_type, settings in table
    ]


def _diffusion(kind: str, batch: Callable[[], Batch], settings: Mapping[str, Any]) -> Architecture:
    return Architecture(kind, "diffusion", lambda: (from_diffusers(kind, settings), batch()))


ALL_ARCHITECTURES = [
    *_languages(),
    *(
        architecture(*line)
        for table in (VISIONS, SPEECHES, MULTIMODAL, SEQUENCES)
        for line in table
    ),
    *(_diffusion(*line) for line in DIFFUSION),
]
