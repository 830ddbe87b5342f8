"""`optim_db`: a small model trained by each optimizer, with each of its sets of options."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

import rekindle
from tests.differ.judge import smallest
from tests.differ.modes import Evict
from tests.pytorch import cores
from tests.pytorch.bits import differing, everything
from tests.pytorch.sweep._verdict import SEED, Case, Entries, Verdict, drawn, in_words
from tests.pytorch.tracker import measure

STEPS = 3
SHARE = 0.4  #: budget as a share of the activation memory


def entries() -> Entries:
    """Yield the cases of each optimizer: its sets of options with each of its implementations."""
    return {info.optim_cls.__name__: lambda few, info=info: _cases(info, few) for info in optim_db}


def _cases(info: OptimizerInfo, few: int | None) -> Iterator[Case]:
    name = info.optim_cls.__name__
    ways = ["", *(way for way in info.supported_impls if way != "capturable")]
    for _, given in drawn(info.optim_inputs_func("cpu"), few, name):
        for way in ways:
            options = {**given.kwargs, **({way: True} if way else {})}
            said = f"{given.desc or 'default'}{' ' if way else ''}{way}"
            yield Training(name, said, info, options, way)


@final
@dataclass(frozen=True)
class Training(Case):
    """A model that is trained in plain PyTorch, and within a part of its activation memory."""

    info: OptimizerInfo
    options: dict[str, Any]
    way: str  #: arguments that select the implementation

    def judge(self, evict: Evict = "saved") -> Verdict:
        with warnings.catch_warnings(action="ignore"):
            try:
                wanted = everything(self.trained()())
            except Exception as error:
                return Verdict("refused", in_words(error))
            try:
                # the optimizer's state may not fit into the first budget
                (got, again), *_ = smallest(self._within, _budget(self))
            except Exception as error:
                return Verdict("different", in_words(error))
        wrong = differing(got, wanted)
        return Verdict("different" if wrong else "same", ", ".join(wrong), again)

    def _within(self, budget: int) -> tuple[dict[str, Any], Counter[str]]:
        step = self.trained()
        with rekindle.budget(budget) as run:
            got = everything(step())
        run._driver.engine.check()
        return got, cores.recomputed(run._driver)

    def trained(self) -> Callable[[], Any]:
        """Return a step function that trains a new model and returns its final state."""
        torch.manual_seed(SEED)
        if self.info.only_supports_sparse_grads:
            model: nn.Module = _Words()
            batch = torch.randint(200, (50,))
        else:
            layers = [each for _ in range(6) for each in (nn.Linear(24, 24), nn.Tanh())]
            model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(24, 1))
            batch = torch.randn(100, 24)
        train = _unrolled if self.options.get("differentiable") else _train
        return lambda: train(model, batch, self.info, self.options)


_budgets: dict[tuple[str, str], int] = {}


def _budget(training: Training) -> int:
    """Return SHARE of the memory with the first set of options; measuring all is slow."""
    key = (training.entry, training.way)
    if key not in _budgets:
        _budgets[key] = measure(training.trained()).budget(SHARE)
    return _budgets[key]


class _Words(nn.Module):
    """A model whose only weight is an embedding with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 24, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for _ in range(6):
            x = (x.sin() * x).exp() * 0.5
        return x


def _train(model: nn.Module, batch: Tensor, info: OptimizerInfo, options: dict[str, Any]) -> object:
    optimizer = info.optim_cls(model.parameters(), **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(STEPS):
        if info.step_requires_closure:
            losses.append(optimizer.step(closure))
        else:
            losses.append(closure())
            optimizer.step()
    return model, [loss.detach() for loss in losses], optimizer.state_dict()["state"]


def _unrolled(
    model: nn.Module, batch: Tensor, info: OptimizerInfo, options: dict[str, Any]
) -> object:
    """Differentiate through the optimizer's steps, as in learning to learn."""
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = info.optim_cls(list(weights.values()), **options)
    for _ in range(STEPS):
        loss = torch.func.functional_call(model, weights, (batch,)).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for weight, gradient in zip(weights.values(), gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    sum(weight.square().sum() for weight in weights.values()).backward()
    return model, list(weights.values()), optimizer.state_dict()["state"]
