"""Draw the parts of a scene (a kind of random program) from a seed, and collect its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pytorch.bits import everything, noted
from tests.pytorch.scenes.functions import FUNCTIONS
from tests.pytorch.scenes.layers import LAYERS, WIDTH, Does

#: Where budgets begin and end. "changes": one budget for all steps, whose amount changes between
#: steps.
Place = Literal["all", "each step", "every other", "from the second", "until the last", "changes"]
PLACES: tuple[Place, ...] = (
    "all", "all", "each step", "every other", "from the second", "until the last", "changes",
)  # fmt: skip


class Own(torch.optim.Optimizer):
    """A custom optimizer: the memory of its step is unknown to Rekindle."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                    mean.lerp_(weight.grad, 0.1)
                    weight.sub_(mean.sign() * group["rate"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.02),
    "momentum": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.005),
    "adamw one by one": lambda p: torch.optim.AdamW(p, 0.005, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.005, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.002, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.005),
    "its own": lambda p: Own(p, 0.001),
}

Budget = Callable[[], AbstractContextManager[Any]]


@dataclass
class World:
    """One random program: `seed` draws its parts, but not the contents of its tensors."""

    seed: int
    # returns a budget, or a context that does nothing for the plain program
    budget: Budget = nullcontext
    change: Callable[[Any, float], None] = lambda run, share: None
    notes: list[Any] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    owned: dict[str, Any] = field(default_factory=dict)  # results that are compared at the end

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        torch.manual_seed(self.seed)
        self.place: Place = self.rng.choice(PLACES)
        self.steps = self.rng.choice((2, 3, 4))
        self.rows = self.rng.choice((4, 8, 16))
        self._stack = ExitStack()

    # -- parts of a program -----------------------------------------------------------------------

    def net(self, name: str = "net", most: int = 6) -> nn.Module:
        """Build a random network; the test compares its weights with those in plain PyTorch."""
        parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
        for _ in range(self.rng.randint(1, most)):
            if self.rng.random() < 0.3:
                chosen = self.rng.choice(sorted(FUNCTIONS))
                parts.append(Does(FUNCTIONS[chosen]))
            else:
                chosen = self.rng.choice(sorted(LAYERS))
                parts.append(LAYERS[chosen]())
            self.drawn.append(chosen)
        parts.append(nn.LayerNorm(WIDTH))
        return self.own(name, nn.Sequential(*parts))

    def optimizer(self, *nets: nn.Module, name: str = "optimizer") -> torch.optim.Optimizer:
        """Draw an optimizer for all weights of `nets`."""
        chosen = self.rng.choice(sorted(OPTIMIZERS))
        self.drawn.append(chosen)
        weights = [p for net in nets for p in net.parameters() if p.requires_grad]
        return self.own(name, OPTIMIZERS[chosen](weights))

    def batch(self, rows: int | None = None) -> Tensor:
        """Draw one batch."""
        return torch.randn(rows or self.rows, 8, WIDTH)

    def loss(self, result: Tensor, target: Tensor | None = None) -> Tensor:
        """Draw a loss of one of three kinds."""
        kind = self.rng.choice(("square", "absolute", "classes"))
        if kind == "square" or target is None:
            return (result if target is None else result - target).square().mean()
        if kind == "absolute":
            return F.smooth_l1_loss(result, target)
        return F.cross_entropy(result.flatten(0, 1), target.flatten(0, 1).argmax(-1))

    def own(self, name: str, value: Any) -> Any:
        """Register `value` for the comparison at the end."""
        self.owned[name] = value
        return value

    # -- budgets ---------------------------------------------------------------------------------

    def loop(self) -> Iterator[int]:
        """Yield the number of each step.

        Enter and leave budgets between steps, at the randomly chosen steps that `place` names.
        """
        if self.place in ("all", "until the last", "changes"):
            run = self._stack.enter_context(self.budget())
        for step in range(self.steps):
            if self.place == "until the last" and step == self.steps - 1:
                self._stack.close()
            if self.place == "from the second" and step == 1:
                self._stack.enter_context(self.budget())
            if self.place == "changes" and step:
                self.change(run, self.rng.uniform(0.9, 1.3))
            each = self.place == "each step" or (self.place == "every other" and step % 2 == 0)
            with self.budget() if each else nullcontext():
                yield step
        self._stack.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Leave at the end every budget that is still active, also after an exception."""
        with self._stack:
            yield

    # -- results to compare -----------------------------------------------------------------------

    def note(self, *values: Any) -> None:
        """Note copies of the values as they are now."""
        self.notes.extend(noted(value) for value in values)

    def left(self) -> dict[str, Any]:
        """Return copies of all results of the program, and the state of the random generator."""
        return everything({**self.owned, "notes": self.notes})
