"""Find the smallest budgets for the phases of a run: training, evaluation, and the whole run.

The run is cut into parts, at moments when no autograd graph is alive that the part made: after an
optimizer step, and at a call of a model if no more memory is in use than at the call before, or if
grad mode has changed. Otherwise the next part could not evict what the graph has saved. So a step
of two networks (a GAN), or with a pass of another model without gradients, is one part. Each part
is recorded as a trace and simulated within small budgets, unless earlier parts show that it needs
no larger one. A part without gradients is evaluation (or sampling); the others are training.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rekindle._types import Bytes
from rekindle.pytorch.context import Run
from rekindle.pytorch.native import Step
from rekindle.pytorch.observed._floor import least_in_slices
from rekindle.simulator import curve, fits, smallest_budget
from rekindle.trace import Trace, neediest

TRAINING: Final = "training"
EVALUATION: Final = "evaluation"
#: Name of the phase before the first call of a model. This phase counts for the whole run only.
_BEFORE: Final = ""

MOST_PARTS: Final = 64
"""Most parts of a phase to simulate. Further parts are simulated only at a new largest peak."""

MOST_REPETITIONS: Final = 16
"""Most further simulations of a phase with other times of operators."""

MOST_OPERATORS: Final = 50_000
"""Most operators in all further simulations of a phase. They take at most a few seconds."""


@final
@dataclass(slots=True)
class _Phase:
    """The memory that the parts of one phase need, found by simulation.

    Attributes:
        smallest: The smallest budget (bytes) within which all parts so far run.
        peak: The largest peak (bytes) of a part without a limit.
        parts: The number of parts that were simulated.
        seen: For each simulated part, its peak and the memory at its start (bytes). A part with
            equal figures is not simulated.
        hardest: Trace of the part that needs the budget `smallest`.
    """

    smallest: Bytes = 0
    peak: Bytes = 0
    parts: int = 0
    seen: set[tuple[Bytes, Bytes]] = field(default_factory=set[tuple[Bytes, Bytes]])
    hardest: Trace | None = None

    @property
    def named(self) -> Bytes:
        """The budget to suggest: `smallest` with the margin, but never above the peak."""
        return min(self.peak, int((1 + Phases.MARGIN) * self.smallest))


@final
class Phases:
    """Finds the smallest budget for each phase of a run.

    The run itself has no memory limit, or one that it does not reach.
    """

    MARGIN: Final = 0.05
    """Fraction added to the simulated budget.

    The simulator knows one part of the run at a time. It cannot evict memory that an earlier part
    left behind.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._driver = run._driver
        self._phases: dict[str, _Phase] = {}
        self._now = _BEFORE
        self._part: Any = None
        self._start: Bytes = 0  # bytes in use at the start of the present part of the run
        self._saved: Bytes = 0  # bytes of them that a graph of an earlier part has saved
        # Of the optimizer steps in the present part: their peak, and the bytes that autograd had
        # saved at the end of the last one.
        self._peak: Bytes = 0
        self._at_step: Bytes | None = None
        self._at_call: Bytes = 0  # bytes in use at the last call of a model
        self._depth = 0
        self._here = os.getpid(), threading.get_ident()

    @contextmanager
    def watch(self) -> Generator[None]:
        """Observe everything that runs while the context is open."""
        hooks = [
            register_module_forward_pre_hook(self._called),
            register_module_forward_hook(self._returned, always_call=True),
        ]
        self._run.on_step(self._stepped)
        self._begin()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._driver.steps.listeners.remove(self._stepped)
            if os.getpid() == self._here[0]:
                self._end(self._driver.engine.peak)
                self._repeat_with_other_times()

    # -- results ----------------------------------------------------------------------------------

    @property
    def budgets(self) -> dict[str, Bytes]:
        """The smallest budget for each phase, margin included."""
        return {name: phase.named for name, phase in self._phases.items() if name}

    @property
    def whole(self) -> Bytes:
        """The smallest budget for the whole run, margin included; 0 if nothing ran."""
        return max((phase.named for phase in self._phases.values()), default=0)

    @property
    def sliceable(self) -> tuple[str, ...]:
        """The operators that set these budgets as a whole, although they can run in slices."""
        names = self._driver.sliceable
        found = {
            neediest(phase.hardest)[0]: None
            for phase in self._phases.values()
            if phase.hardest is not None
            and least_in_slices(phase.hardest, phase.smallest, names) < phase.smallest
        }
        return tuple(found)

    def other_budgets(self, points: int) -> list[tuple[Bytes, float]]:
        """Simulate the part of training that needs the most memory within several budgets.

        Args:
            points: The number of budgets to simulate.

        Returns:
            Pairs of a budget (bytes) and the time of recomputation within it, as a fraction of the
            time without recomputation.
        """
        phase = self._phases.get(TRAINING) or self._phases.get(_BEFORE)
        trace = None if phase is None else phase.hardest
        if trace is None:
            return []
        compute_ns = max(1, trace.compute_ns)
        found = curve(trace, self._run.policy, points=points)
        return [(point.budget, point.recompute_ns / compute_ns) for point in found]

    # -- where parts of the run begin and end -----------------------------------------------------

    def _called(self, module: nn.Module, _: Any) -> None:
        if not self._is_here():
            return
        self._depth += 1
        if self._depth > 1 or next(module.parameters(), None) is None:
            return
        phase = TRAINING if torch.is_grad_enabled() else EVALUATION
        memory = self._run.memory
        if (phase != self._now or memory <= self._at_call) and (
            memory <= self._start or self._made_no_graph(self._driver.bytes_saved())
        ):
            self._end(self._driver.engine.peak)
            self._now = phase
            self._begin()
        self._at_call = memory

    def _returned(self, module: nn.Module, _: Any, result: Any) -> None:
        if self._is_here():
            self._depth -= 1

    def _stepped(self, step: Step) -> None:
        if not self._is_here():
            return
        self._now = self._now or TRAINING
        saved = self._driver.bytes_saved()
        # A graph that outlives two steps stays alive for longer, so the part need not wait for it.
        outlives = self._at_step is not None and saved >= self._at_step
        if self._made_no_graph(saved) or outlives:
            self._end(step.peak)
            self._begin()
        else:
            self._peak, self._at_step = max(self._peak, step.peak), saved

    def _made_no_graph(self, saved: Bytes) -> bool:
        """Return True if no graph that the present part made is alive.

        Graphs of a hundredth of the memory do not count: the margin of the budget covers them.

        Args:
            saved: The bytes that autograd has saved now.
        """
        return saved <= max(self._saved, self._start // 100)

    def _is_here(self) -> bool:
        # Ask this first. Dynamo traces hooks of modules inside compiled code, but it can trace
        # neither of the other functions: it would cut the code into pieces.
        if torch.compiler.is_compiling():
            return False
        return self._here == (os.getpid(), threading.get_ident())

    def _begin(self) -> None:
        driver = self._driver
        with driver.lock:
            self._start, self._saved = driver.engine.memory, driver.bytes_saved()
            self._peak, self._at_step = 0, None
            self._part = driver.also_capture()

    def _end(self, peak: Bytes) -> None:
        """End the present part and simulate it. It can need at most `peak` bytes."""
        part, self._part = self._part, None
        if part is None:
            return
        driver = self._driver
        with driver.lock:
            driver.capture_no_more()
        peak = max(peak, self._peak)
        self._judge(self._phases.setdefault(self._now, _Phase()), part, peak)

    def _repeat_with_other_times(self) -> None:
        """Make each budget suffice for later runs too, in which operators take other times."""
        for phase in self._phases.values():
            if phase.hardest is not None:
                count = min(MOST_REPETITIONS, MOST_OPERATORS // len(phase.hardest.ops))
                phase.smallest = smallest_budget(
                    phase.hardest, self._run.policy, above=phase.smallest, other_times=count
                )

    def _judge(self, phase: _Phase, part: Any, peak: Bytes) -> None:
        """Simulate `part` if it may need a larger budget than the earlier parts of `phase`."""
        seen = peak, self._start
        larger, phase.peak = peak > phase.peak, max(peak, phase.peak)
        if peak <= phase.smallest or seen in phase.seen:
            return
        if phase.parts >= MOST_PARTS and not larger:
            return
        phase.seen.add(seen)
        phase.parts += 1
        trace, policy = part.trace(), self._run.policy
        if trace.ops and (not phase.smallest or fits(trace, phase.smallest, policy) is None):
            phase.smallest = smallest_budget(trace, policy, above=phase.smallest)
            phase.hardest = trace
