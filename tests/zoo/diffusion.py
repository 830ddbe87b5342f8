"""Small networks of diffusion models: class, batch and settings of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.zoo.batches import Batch


def _noisy(*shape: int, **more: Callable[[], Tensor]) -> Callable[[], Batch]:
    def batch() -> Batch:
        drawn = {name: draw() for name, draw in more.items()}
        steps = {"timestep": torch.randint(0, 1_000, (shape[0],))}
        return {"sample": torch.randn(*shape), **steps, **drawn}

    return batch


SMALL = {"norm_num_groups": 4, "layers_per_block": 1}
DIFFUSION: list[tuple[str, Callable[[], Batch], Mapping[str, Any]]] = [
    ("UNet2DModel", _noisy(2, 3, 16, 16),
     {"sample_size": 16, "block_out_channels": (16, 32), "dropout": 0.1, "attention_head_dim": 8,
      "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
      "up_block_types": ("AttnUpBlock2D", "UpBlock2D")} | SMALL),
    ("UNet2DConditionModel",
     _noisy(2, 4, 16, 16, encoder_hidden_states=lambda: torch.randn(2, 7, 24)),
     {"sample_size": 16, "block_out_channels": (16, 32), "dropout": 0.1, "attention_head_dim": 8,
      "cross_attention_dim": 24,
      "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
      "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")} | SMALL),
    ("UNet3DConditionModel",
     _noisy(1, 4, 3, 16, 16, encoder_hidden_states=lambda: torch.randn(1, 7, 24)),
     {"sample_size": 16, "block_out_channels": (32, 32), "attention_head_dim": 8,
      "cross_attention_dim": 24, "norm_num_groups": 32, "layers_per_block": 1,
      "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
      "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")}),
    ("AutoencoderKL", lambda: {"sample": torch.randn(2, 3, 32, 32), "sample_posterior": True},
     {"block_out_channels": (16, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
      "up_block_types": ("UpDecoderBlock2D",) * 2} | SMALL),
    ("DiTTransformer2DModel",
     lambda: {"hidden_states": torch.randn(2, 4, 16, 16),
              "timestep": torch.randint(0, 1_000, (2,)), "class_labels": torch.arange(2)},
     {"num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 8,
      "num_layers": 2, "sample_size": 16, "patch_size": 2, "num_embeds_ada_norm": 10,
      "dropout": 0.1, "norm_num_groups": 4}),
]  # fmt: skip
