"""A randomly drawn training loop, and its source: the printed program is the one that runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from random import Random
from textwrap import indent
from typing import Self

from tests.differ.judge import Complaint
from tests.differ.modes import ROOMY, Setting
from tests.pytorch import cores
from tests.pytorch.hunt.blocks import BLOCKS
from tests.pytorch.hunt.drivers import DRIVERS, Driver
from tests.pytorch.hunt.habits import HABITS, Habit
from tests.pytorch.hunt.known import why_known
from tests.pytorch.hunt.modes import MODES
from tests.pytorch.hunt.script import Text

LINE = "\n"
PERIOD = 6
#: Operators that are not interrupted, because they allocate nothing, or because the program may
#: catch the OutOfBudget that they raise.
NEVER_FAIL = (
    "aten.detach.default",
    "aten.view.default",
    "aten.t.default",
    "aten.alias.default",
    "aten.empty.memory_format",
)
OPTIMIZERS = (
    "SGD(parameters(net), 0.02)",
    "SGD(parameters(net), 0.02, momentum=0.9, weight_decay=0.01)",
    "SGD(parameters(net), 0.02, momentum=0.9, foreach=False)",
    "Adam(parameters(net), 0.01)",
    "Adam(parameters(net), 0.01, amsgrad=True, foreach=False)",
    "Adam(parameters(net), 0.01, fused=True)",
    "AdamW(parameters(net), 0.01)",
    "NAdam(parameters(net), 0.01)",
    "RAdam(parameters(net), 0.01)",
    "RMSprop(parameters(net), 0.005, centered=True, momentum=0.5)",
    "Adagrad(parameters(net), 0.02)",
    "Adadelta(parameters(net))",
    "Rprop(parameters(net), 0.005)",
    "ASGD(parameters(net), 0.02)",
    "Adafactor(parameters(net), 0.01)",
)
#: Where budgets are entered: around the loop, each step, each forward pass, each half of the loop,
#: every other step, or the first two steps.
PLACES = ("loop", "step", "forward", "halves", "every other step", "two steps")
LOSSES = (
    "loss = F.mse_loss(y, target)",
    "loss = y.square().mean()",
    "loss = (y - target).abs().sum() / len(y)",
    "loss = F.cross_entropy(y.flatten(0, 1), target.argmax(-1).flatten())",
    "loss = F.smooth_l1_loss(y, target, beta=0.5)",
    "loss = 1 - F.cosine_similarity(y, target, dim=-1).mean()",
    "loss = F.margin_ranking_loss(y.flatten(), target.flatten(), target.flatten().sign())",
    "loss = F.gaussian_nll_loss(y, target, y.square() + 0.1)",
    "loss = F.kl_div(y.log_softmax(-1), target.softmax(-1), reduction='batchmean')",
)


@dataclass(frozen=True)
class Loop(Text):
    """A drawn training loop.

    `place` says where budgets are entered. `trip` has the name and the number of the operator that
    raises `Interrupted`. The loop catches this error around each step.
    """

    blocks: tuple[str, ...]
    driver: str = "plain"
    habits: tuple[str, ...] = ()
    optimizer: str = OPTIMIZERS[0]
    loss: str = LOSSES[0]
    place: str = "loop"
    steps: int = 3
    sizes: tuple[tuple[int, int], ...] = ((6, 8),)
    seed: int = 0
    interrupted: bool = False
    trip: tuple[str, int] | None = None

    @property
    def parts(self) -> Iterator[str]:
        """Yield the names of the parts of this loop, which the list of known defects refers to."""
        yield from (f"block {name}" for name in self.blocks)
        yield from (f"habit {name}" for name in self.habits)
        yield f"driver {self.driver}"
        yield f"place {self.place}"
        yield f"loss {self.loss.removeprefix('loss = ').removeprefix('F.').split('(')[0]}"
        yield f"optimizer {self.optimizer.split('(')[0]}"
        if self.interrupted:
            yield "interrupted"

    @property
    def without(self) -> Iterator[Self]:
        """Yield simpler versions of this loop, to find a small one that still fails.

        Each lacks a part, such as a habit or half of the blocks, or has fewer steps, or has the
        simplest place, loss or optimizer.
        """
        if self.interrupted:
            yield replace(self, interrupted=False, trip=None)
        if self.driver != "plain":
            yield replace(self, driver="plain")
        half = len(self.blocks) // 2
        if half > 1:
            yield replace(self, blocks=self.blocks[half:])
            yield replace(self, blocks=self.blocks[:half])
        if len(self.habits) > 2:
            yield replace(self, habits=())
        for i in range(len(self.habits)):
            yield replace(self, habits=self.habits[:i] + self.habits[i + 1 :])
        for i in range(len(self.blocks)):
            yield replace(self, blocks=self.blocks[:i] + self.blocks[i + 1 :])
        for steps in range(1, self.steps):
            yield replace(self, steps=steps)
        if len(self.sizes) > 1:
            yield replace(self, sizes=self.sizes[:1])
        for name, simplest in (
            ("place", "loop"),
            ("loss", LOSSES[1]),
            ("optimizer", OPTIMIZERS[0]),
        ):
            if getattr(self, name) != simplest:
                yield replace(self, **{name: simplest})

    @property
    def ready(self) -> Self:
        """Return this loop with the operator to interrupt, if one is to be interrupted."""
        if not self.interrupted:
            return self
        setting = Setting(None)
        replace(self, trip=None).run(setting)
        order = [each for each in setting.order if each[0] not in NEVER_FAIL]
        if not order:
            return replace(self, interrupted=False)
        return replace(self, trip=Random(self.seed).choice(order))

    def known(self, found: Complaint) -> str:
        return why_known([*self.parts], found)

    def grown(self) -> Complaint | None:
        """Return a complaint if bookkeeping grows each step, and plain PyTorch's memory does not.

        Each step is compared with the step `PERIOD` steps earlier, which has inputs of the same
        size: sizes repeat after one, two or three steps. Chains of values that a program carries
        from step to step may be `PERIOD` calls long.
        """
        kept: list[int] = []
        for steps in (PERIOD, PERIOD * 2):
            measuring = Setting(None, measuring=True)
            replace(self, steps=steps).run(measuring)
            kept.append(measuring.kept)
        if kept[0] != kept[1]:  # the program itself keeps something of every step
            return None
        mode = MODES["unlimited"]
        setting = Setting(mode, ROOMY, counting=True)
        with mode.around(), cores.short_memory(PERIOD):
            replace(self, steps=PERIOD * 3).run(setting)
        if len(setting.marks) < PERIOD * 3:
            return None
        for kind, name in enumerate(("storages", "bytes")):
            seen = [mark[kind] for mark in setting.marks]
            if all(seen[i] > seen[i - PERIOD] for i in range(PERIOD, PERIOD * 3)):
                return Complaint(mode.name, ROOMY, f"{name} grow with every step: {seen}")
        return None

    # -- text --------------------------------------------------------------------------------------

    def source(self) -> str:
        habits = [HABITS[name] for name in self.habits]
        driver = DRIVERS[self.driver]
        lines = [
            f"torch.manual_seed({self.seed})",
            f"rng = np.random.default_rng({self.seed})",
            *self._network(),
            "net = planned(Net(), torch.zeros(6, 8, 8))",
            f"optimizer = torch.optim.{self.optimizer}",
            driver.setup,
            *(habit.setup for habit in habits),
            self._around(self._step(driver, habits)),
        ]
        return "\n".join(line for line in lines if line) + "\n"

    def _network(self) -> Iterator[str]:
        build = ["super().__init__()", "self.first = nn.Linear(8, 8)"]
        forward = ["x = self.first(x)"]
        for number, name in enumerate(self.blocks):
            block, own = BLOCKS[name], f"self.{name}_{number}"
            build.append(_named(block.build, own))
            forward.append(_named(block.forward, own))
        yield "class Net(nn.Module):"
        yield "    def __init__(self):"
        yield indent("\n".join(filter(None, build)), " " * 8)
        yield "    def forward(self, x):"
        yield indent("\n".join([*forward, "return x"]), " " * 8)

    def _step(self, driver: Driver, habits: list[Habit]) -> str:
        """Return the body of the loop: a step, with its budget unless that is around the loop."""
        forward = next((habit.call for habit in habits if habit.call), "y = net(x)")
        contexts = [habit.around for habit in habits if habit.around]
        if self.place == "forward":
            contexts.insert(0, "budget()")
        if contexts:
            forward = f"with {', '.join(contexts)}:\n{_deeper(forward)}"
        batch = ["x, target = torch.randn(*size, 8), torch.randn(*size, 8)"]
        batch += [habit.batch for habit in habits]
        backward = next((habit.backward for habit in habits if habit.backward), "loss.backward()")
        zero = next((habit.zero for habit in habits if habit.zero), "optimizer.zero_grad()")
        filled = {
            "@batch": _all(batch),
            "@forward": forward,
            "@loss": _all([self.loss, *(habit.loss for habit in habits)]),
            "@backward": backward,
            "@after": _all(habit.after for habit in habits),
            "@update": _all(["optimizer.step()", *(habit.between for habit in habits), zero]),
        }
        body = [f"size = {self.sizes}[step % {len(self.sizes)}]"]
        body += [habit.before for habit in habits]
        body.append(_filled(driver.step, filled))
        body += ["note(loss)", *(habit.last for habit in habits)]
        text = _all(body)
        if self.place == "step":
            return self._caught(f"with budget():\n{_deeper(text)}")
        if self.place == "every other step":
            return self._caught(f"with budget() if step % 2 else nullcontext():\n{_deeper(text)}")
        return self._caught(text)

    def _caught(self, step: str) -> str:
        if not self.interrupted:
            return step + "\nmark()"
        lost = "note('interrupted')\noptimizer.zero_grad()"
        return f"try:\n{_deeper(step)}\nexcept Interrupted:\n{_deeper(lost)}\nmark()"

    def _around(self, step: str) -> str:
        loop = f"for step in range({self.steps}):\n{_deeper(step)}"
        if self.place == "loop":
            loop = f"with budget():\n{_deeper(loop)}"
        elif self.place == "halves":
            half = max(1, self.steps // 2)
            parts = f"(range({half}), range({half}, {self.steps}))"
            inner = _deeper(f"with budget():\n{_deeper(f'for step in part:{LINE}{_deeper(step)}')}")
            loop = f"for part in {parts}:\n{inner}"
        elif self.place == "two steps":
            loop = f"{loop}\n    if step == 1:\n        break"
            rest = f"for step in range(2, {self.steps}):\n{_deeper(step)}"
            loop = f"with budget():\n{_deeper(loop)}\n{rest}"
        if self.interrupted:
            name, number = self.trip or ("", 0)
            loop = f'with interrupts("{name}", {number}) as trip:\n{_deeper(loop)}'
        return loop


def _named(text: str, own: str) -> str:
    """Return the text with `M` and names that begin with `M_` replaced by the block's name."""
    return "".join(
        own if word == "M" else own + word[1:] if word.startswith("M_") else word
        for word in _words(text)
    )


def _words(text: str) -> Iterator[str]:
    word = ""
    for letter in text:
        if letter.isalnum() or letter == "_":
            word += letter
        else:
            yield word
            yield letter
            word = ""
    yield word


def _filled(template: str, filled: dict[str, str]) -> str:
    lines = []
    for line in template.splitlines():
        place = line.strip()
        if place in filled:
            lines.append(indent(filled[place], line[: len(line) - len(place)]))
        else:
            lines.append(line)
    return "\n".join(filter(str.strip, lines))


def _deeper(text: str) -> str:
    return indent(text, " " * 4)


def _all(lines: Collection[str] | Iterator[str]) -> str:
    return "\n".join(filter(None, lines))


# -- drawing ---------------------------------------------------------------------------------------


def random_loop(rng: Random) -> Loop:
    blocks, drivers, habits = list(BLOCKS), list(DRIVERS), list(HABITS)
    count = rng.choice((1, 2, 3, 3, 4, 5, 7))
    optimizer = rng.choice(OPTIMIZERS)
    drawn = tuple(rng.choice(blocks) for _ in range(count))
    if "embedding_sparse" in drawn:
        optimizer = OPTIMIZERS[0]
    return Loop(
        drawn,
        "plain" if rng.random() < 0.25 else rng.choice(drivers),
        _compatible(rng.sample(habits, rng.choice((0, 1, 2, 3, 4)))),
        optimizer,
        rng.choice(LOSSES),
        "loop" if rng.random() < 0.4 else rng.choice(PLACES),
        rng.choice((2, 3, 3, 4, 5)),
        rng.choice((((6, 8),), ((6, 8),), ((6, 8), (4, 8)), ((6, 8), (6, 6), (4, 7)))),
        rng.randrange(1000),
        rng.random() < 0.2,
    )


def _compatible(names: list[str]) -> tuple[str, ...]:
    chosen: list[str] = []
    taken: set[str] = set()
    for name in names:
        slots = {slot for slot in ("call", "backward", "zero") if getattr(HABITS[name], slot)}
        if not slots & taken:
            chosen.append(name)
            taken |= slots
    return tuple(chosen)
