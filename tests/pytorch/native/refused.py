"""Small programs of many kinds, for tests that raise `OutOfBudget` at any operator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.pytorch import networks

WIDTH = 16
ROWS = 8


class Program:
    """A program of phases that run one after the other. The test repeats a phase that failed.

    Attributes:
        phases: Functions that train and return a loss to compare.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[optim.Optimizer],
        phases: Sequence[Callable[[], Tensor]],
    ) -> None:
        self.modules = nn.ModuleList(modules)
        self.optimizers = optimizers
        self.phases = phases

    def trained(self) -> dict[str, Any]:
        """Return the state that an optimizer changes: weights, and its own state."""
        weights = dict(self.modules.named_parameters())
        states = [_flat(each.state_dict()) for each in self.optimizers]
        found = {
            **weights,
            **{f"{i}{k}": v for i, each in enumerate(states) for k, v in each.items()},
        }
        return copy.deepcopy(found)

    def rest(self) -> dict[str, Tensor]:
        """Return the state that a forward pass changes: buffers and the random generator."""
        buffers = {name: each.clone() for name, each in self.modules.named_buffers()}
        return {**buffers, "generator": torch.get_rng_state()}

    def put_back(self, rest: dict[str, Tensor]) -> None:
        torch.set_rng_state(rest["generator"])
        with torch.no_grad():
            for name, each in self.modules.named_buffers():
                each.copy_(rest[name])

    def gradients(self) -> dict[str, Any]:
        found = {name: each.grad for name, each in self.modules.named_parameters()}
        return {f"{name}.grad": None if g is None else g.clone() for name, g in found.items()}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    else:
        return {name: value}
    return {k: v for key, item in pairs for k, v in _flat(item, f"{name}.{key}").items()}


def _trained(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    make: Any = optim.SGD,
    micro: int = 1,
    clip: bool = False,
    **options: Any,
) -> Program:
    optimizer = make(model.parameters(), **({"lr": 0.01} | options))

    def backward() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(micro):
            loss = loss_of(model) / micro
            loss.backward()
            total += loss.detach()
        if clip:
            clip_grad_norm_(model.parameters(), 0.1)
        return total

    def phase() -> Tensor:
        if isinstance(optimizer, optim.LBFGS):
            return torch.as_tensor(optimizer.step(backward))
        loss = backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], [phase, phase])


def _mlp(*between: Callable[[], nn.Module], depth: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), *(make() for make in between or (nn.Tanh,))]
    return nn.Sequential(*layers)


def _square(of: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x)) -> Any:
    x = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    return lambda model: of(model, x.clone()).square().mean()


def _optimized(make: Any, **options: Any) -> Callable[[], Program]:
    return lambda: _trained(_mlp(), _square(), make, **options)


def _with(*between: Callable[[], nn.Module]) -> Callable[[], Program]:
    return lambda: _trained(_mlp(*between), _square(), optim.Adam)


def _computed(of: Callable[[Any, Tensor], Tensor], **options: Any) -> Callable[[], Program]:
    return lambda: _trained(_mlp(), _square(of), optim.Adam, **options)


def _tokens(model: Callable[[], nn.Module]) -> Callable[[], Program]:
    def loss(model: nn.Module) -> Tensor:
        text = torch.arange(2 * 9).reshape(2, 9) % 12
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return lambda: _trained(model(), loss, optim.AdamW)


def _pixels(
    model: Callable[[], nn.Module], channels: int = 3, classes: bool = True
) -> Callable[[], Program]:
    def loss(model: nn.Module) -> Tensor:
        pixels = torch.linspace(-1, 1, 2 * channels * 16 * 16).reshape(2, channels, 16, 16)
        scores = model(pixels)
        return F.cross_entropy(scores, torch.tensor([0, 1])) if classes else scores.square().mean()

    return lambda: _trained(model(), loss, optim.SGD, momentum=0.9)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, 2 * x)
        return x * x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        _, doubled = ctx.saved_tensors
        return 2 * doubled * gradient


def _checkpointed(model: Any, x: Tensor) -> Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def _overwritten(model: Any, x: Tensor) -> Tensor:
    for layer in model:
        y = (2 * layer(x)).add_(1)
        y[:, ::2].mul_(0.5)
        x = y.sigmoid_()
    return x


def _penalty(model: Any, x: Tensor) -> Tensor:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x) + slope


def _twice(model: Any, x: Tensor) -> Tensor:
    y = model(x)
    y.sum().backward(retain_graph=True)
    return y


def _hooked(model: Any, x: Tensor) -> Tensor:
    y = model(x)
    y.register_hook(lambda gradient: gradient * 0.5)
    return y


def _autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float()


def _picked(model: Any, x: Tensor) -> Tensor:
    y = model(x)
    best, at = y.topk(3)
    return best + y[y > 0].sum() + y.gather(1, at).sort(1).values


def _spectrum(model: Any, x: Tensor) -> Tensor:
    return torch.fft.rfft(model(x)).abs()


def _kept(model: Any, x: Tensor) -> Tensor:
    kept = []
    for layer in model:
        x = layer(x)
        kept.append(x)
    return torch.stack(kept)


def _measured(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = model(x).abs().max() + 1
    return model(x) / scale


def _sparse() -> Program:
    model = nn.Embedding(20, WIDTH, sparse=True)
    once = _trained(model, lambda model: model(torch.arange(7)).square().sum(), optim.SparseAdam)
    return Program(
        once.modules, once.optimizers, once.phases[:1]
    )  # the second call equals the first


def _recurrent() -> Program:
    model = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    x = torch.linspace(-1, 1, 2 * 5 * WIDTH).reshape(2, 5, WIDTH)
    return _trained(model, lambda model: model(x)[0].square().mean(), optim.Adam)


def _two_players() -> Program:
    model = networks.GAN(noise=4, width=2)
    critic = optim.Adam(model.critic.parameters())
    generator = optim.Adam(model.generator.parameters())

    def judge() -> Tensor:
        critic.zero_grad()
        with torch.no_grad():
            made = model.generator(torch.randn(2, 4))
        loss = model.critic(made).square().mean() - model.critic(torch.randn_like(made)).mean()
        loss.backward()
        critic.step()
        return loss.detach()

    def make() -> Tensor:
        # The backward pass below also adds to the critic's gradients. If it failed halfway, they
        # must be zero before it is repeated.
        model.zero_grad()
        loss = -model.critic(model.generator(torch.randn(2, 4))).mean()
        loss.backward()
        generator.step()
        return loss.detach()

    return Program([model], [critic, generator], [judge, make])


def _averaged() -> Program:
    model, average = _mlp(), _mlp()
    trained = _trained(model, _square(), optim.Adam)
    ema = optim.SGD(average.parameters(), lr=0.1)

    def follow() -> Tensor:
        """Move an average of weights by an optimizer, for which this update is a step."""
        for mine, its in zip(average.parameters(), model.parameters(), strict=True):
            mine.grad = mine.detach() - its.detach()
        nothing = torch.zeros(())
        ema.step()
        return nothing

    step = trained.phases[0]
    return Program([model, average], [*trained.optimizers, ema], [step, follow, step, follow])


PROGRAMS: dict[str, Callable[[], Program]] = {
    "sgd": _optimized(optim.SGD, momentum=0.9),
    "adam": _optimized(optim.Adam, foreach=False),
    "adam_foreach": _optimized(optim.AdamW, foreach=True),
    "adam_fused": _optimized(optim.AdamW, fused=True),
    "rmsprop": _optimized(optim.RMSprop, centered=True),
    "adagrad": _optimized(optim.Adagrad),
    "lbfgs": _optimized(optim.LBFGS, max_iter=3),
    "sparse": _sparse,
    "dropout": _with(nn.ReLU, lambda: nn.Dropout(0.3)),
    "batch_norm": _with(lambda: nn.BatchNorm1d(WIDTH), nn.GELU),
    "layer_norm": _with(lambda: nn.LayerNorm(WIDTH), lambda: nn.ReLU(inplace=True)),
    "weight_norm": lambda: _trained(weight_norm(nn.Linear(WIDTH, WIDTH)), _square(), optim.Adam),
    "accumulation": lambda: _trained(_mlp(), _square(), optim.SGD, micro=3, clip=True),
    "checkpoint": _computed(_checkpointed),
    "in_place": _computed(_overwritten),
    "penalty": _computed(_penalty),
    "twice": _computed(_twice),
    "hook": _computed(_hooked),
    "autocast": _computed(_autocast),
    "topk": _computed(_picked),
    "fft": _computed(_spectrum),
    "kept": _computed(_kept),
    "no_grad": _computed(_measured),
    "function": _computed(lambda model, x: _Doubled.apply(model(x))),
    "lstm": _recurrent,
    "gan": _two_players,
    "average": _averaged,
    "gpt": _tokens(lambda: networks.GPT(vocabulary=12, width=WIDTH, heads=2, layers=1, context=8)),
    "encoder": _tokens(lambda: networks.Encoder(vocabulary=12, width=WIDTH, layers=1, context=8)),
    "resnet": _pixels(lambda: networks.ResNet(width=4, depths=(1, 1), classes=2)),
    "unet": _pixels(lambda: networks.UNet(width=4, levels=2), channels=1, classes=False),
}
