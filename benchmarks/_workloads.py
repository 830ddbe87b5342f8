"""Define the eight networks that most benchmarks train, in sizes for a CPU and for a large GPU.

They are ordinary eager models. `blocks` lists the modules that a user of `torch.utils.checkpoint`
would wrap. Other tools need this list; Rekindle does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _common import ROOT as _ROOT  # this import makes `tests` importable
from tests.pytorch import networks
from torch import Tensor, nn

assert _ROOT


@dataclass(frozen=True)
class Workload:
    """A training step.

    Attributes:
        blocks: Names of the modules that a user of `torch.utils.checkpoint` would wrap.
        dynamic: True if control flow depends on tensors' values or on objects that are no tensors,
            so that the network cannot be compiled.
        is_chain: True if `_chains.chain` can write the network as a chain of modules.
    """

    name: str
    build: Callable[..., nn.Module]
    batch: Callable[..., Any]
    loss: Callable[[nn.Module, Any], Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]
    cpu: dict[str, int]
    cuda: dict[str, int]
    dynamic: bool = False

    is_chain: bool = False

    def sizes(self, device: str) -> dict[str, int]:
        return self.cuda if device == "cuda" else self.cpu


def _tokens(batch: int, time: int, vocabulary: int, **_: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(vocabulary, (batch, time + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _images(batch: int, size: int, **_: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(100, (batch,))


def _masks(batch: int, size: int, **_: int) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(batch, 1, size, size)
    return pixels, (F.avg_pool2d(pixels, 5, 1, 2) > 0).float()


def _tree(batch: int, leaves: int, **_: int) -> tuple[networks.Tree, Tensor]:
    def tree(count: int) -> networks.Tree:
        if count == 1:
            return networks.Tree(words=torch.randint(100, (batch,)))
        cut = int(torch.randint(1, count, ()))
        return networks.Tree((tree(cut), tree(count - cut)))

    return tree(leaves), torch.randint(5, (batch,))


def _per_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _per_image(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _per_pixel(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def _routed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores, balance = model(batch[0])
    return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten()) + 0.01 * balance


def _gpt(*, vocabulary: int, width: int, layers: int, time: int, **_: int) -> nn.Module:
    heads = max(1, width // 64)
    return networks.GPT(
        vocabulary=vocabulary, width=width, heads=heads, layers=layers, context=time
    )


def _bert(*, vocabulary: int, width: int, layers: int, time: int, **_: int) -> nn.Module:
    return networks.Encoder(vocabulary=vocabulary, width=width, layers=layers, context=time)


def _moe(*, vocabulary: int, width: int, layers: int, **_: int) -> nn.Module:
    return networks.MixtureOfExperts(
        vocabulary=vocabulary, width=width, heads=width // 32, layers=layers, experts=4
    )


def _parts(kind: type[nn.Module]) -> Callable[[nn.Module], list[nn.Module]]:
    return lambda model: [module for module in model.modules() if type(module) is kind]


def _halves_of_gpt(model: nn.Module) -> list[nn.Module]:
    return [part for block in model.blocks for part in block]  # type: ignore[union-attr]


_TEXT = {"vocabulary": 256}
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "gpt", _gpt, _tokens, _per_token, _halves_of_gpt,
            cpu={**_TEXT, "batch": 8, "time": 128, "width": 192, "layers": 8},
            cuda={"vocabulary": 50304, "batch": 16, "time": 1024, "width": 768, "layers": 12},
            is_chain=True,
        ),
        Workload(
            "bert", _bert, _tokens, _per_token, _parts(nn.TransformerEncoderLayer),
            cpu={**_TEXT, "batch": 8, "time": 128, "width": 192, "layers": 8},
            cuda={"vocabulary": 30522, "batch": 64, "time": 512, "width": 768, "layers": 12},
            is_chain=True,
        ),
        Workload(
            "resnet50", lambda *, width, size, **_: networks.ResNet50(width=width, classes=100),
            _images, _per_image, _parts(networks.Bottleneck),
            cpu={"batch": 32, "size": 64, "width": 24},
            cuda={"batch": 256, "size": 224, "width": 64},
            is_chain=True,
        ),
        Workload(
            "unet", lambda *, width, **_: networks.UNet(width=width, levels=4),
            _masks, _per_pixel,
            lambda model: [*model.down, *model.up],  # type: ignore[misc]
            cpu={"batch": 8, "size": 96, "width": 16},
            cuda={"batch": 32, "size": 512, "width": 64},
        ),
        Workload(
            "densenet",
            lambda *, growth, **_: networks.DenseNet(growth=growth, blocks=(6, 8, 6), classes=100),
            _images, _per_image, _parts(networks.DenseLayer),
            cpu={"batch": 16, "size": 48, "growth": 12},
            cuda={"batch": 256, "size": 96, "growth": 32},
        ),
        Workload(
            "lstm",
            lambda *, vocabulary, width, **_: networks.UnrolledLSTM(
                vocabulary=vocabulary, width=width, layers=2
            ),
            _tokens, _per_token, _parts(networks.Cell),
            cpu={**_TEXT, "batch": 64, "time": 64, "width": 192},
            cuda={**_TEXT, "batch": 512, "time": 256, "width": 1024},
        ),
        Workload(
            "tree_lstm",
            lambda *, width, **_: networks.TreeLSTM(vocabulary=100, width=width, classes=5),
            _tree, _per_image, lambda model: [],
            cpu={"batch": 128, "leaves": 32, "width": 192},
            cuda={"batch": 2048, "leaves": 64, "width": 1024},
            dynamic=True,
        ),
        Workload(
            "moe", _moe, _tokens, _routed, _parts(networks.SparseMLP),
            cpu={**_TEXT, "batch": 16, "time": 64, "width": 128, "layers": 4},
            cuda={"vocabulary": 8192, "batch": 32, "time": 1024, "width": 768, "layers": 8},
            dynamic=True,
            is_chain=True,
        ),
    )
}  # fmt: skip
