"""Find the smallest budgets for the phases of a run: training, evaluation, and the whole run.

The run is cut into parts, at places that no graph crosses: at each optimizer step, and at a call of
a model with no more memory in use than at the call before. Each part is recorded and simulated,
unless earlier parts show that it cannot need more. A part without gradients is evaluation (or
sampling); the others are training.
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
from rekindle.pytorch.online import Step
from rekindle.simulator import curve, fits, smallest_budget
from rekindle.trace import Trace

TRAINING: Final = "training"
EVALUATION: Final = "evaluation"
#: Name of parts before the first call of a model. They count only for the whole run.
_BEFORE: Final = ""

MOST_PARTS: Final = 64
"""Most parts of a phase to simulate. Later ones are simulated only if their peak is a new one."""


@final
@dataclass(slots=True)
class _Phase:
    """Needs of the parts of one phase, found by simulation.

    Attributes:
        smallest: The smallest budget (bytes) that suffices for each part, by simulation.
        peak: The largest peak (bytes) of a part.
        parts: The number of parts that were simulated.
        seen: Peak and start (bytes) of each simulated part; an equal part is skipped.
        hardest: Trace of the part that needed `smallest`.
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
    """Observe the phases of a run that has no limit, or one that is never reached."""

    MARGIN: Final = 0.05
    """Fraction added to the simulated budget.

    The simulator knows one part at a time, and cannot evict memory that an earlier part left
    behind.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._driver: Any = run._driver
        self._phases: dict[str, _Phase] = {}
        self._now = _BEFORE
        self._part: Any = None
        self._start: Bytes = 0  # memory at the start of the part
        self._at_call: Bytes = 0  # memory at the last call of a model
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

    # -- results ----------------------------------------------------------------------------------

    @property
    def budgets(self) -> dict[str, Bytes]:
        """The smallest budget for each phase, margin included."""
        return {name: phase.named for name, phase in self._phases.items() if name}

    @property
    def whole(self) -> Bytes:
        """The smallest budget for the whole run, margin included; 0 if nothing ran."""
        return max((phase.named for phase in self._phases.values()), default=0)

    def other_budgets(self, points: int) -> list[tuple[Bytes, float]]:
        """Return budgets for the hardest part of training, each with its relative extra time.

        Args:
            points: How many budgets to simulate.

        Returns:
            Pairs of a budget (bytes) and recomputation time over plain time.
        """
        phase = self._phases.get(TRAINING) or self._phases.get(_BEFORE)
        trace = None if phase is None else phase.hardest
        if trace is None:
            return []
        compute_ns = max(1, trace.compute_ns)
        found = curve(trace, self._run.policy, points=points)
        return [(point.budget, point.recompute_ns / compute_ns) for point in found]

    # -- cuts -------------------------------------------------------------------------------------

    def _called(self, module: nn.Module, _: Any) -> None:
        if not self._is_here():
            return
        self._depth += 1
        if self._depth > 1 or next(module.parameters(), None) is None:
            return
        phase = TRAINING if torch.is_grad_enabled() else EVALUATION
        memory = self._run.memory
        if phase != self._now or memory <= self._at_call:
            self._end(self._driver.engine.peak)
            self._now = phase
            self._begin()
        self._at_call = memory

    def _returned(self, module: nn.Module, _: Any, result: Any) -> None:
        if self._is_here():
            self._depth -= 1

    def _stepped(self, step: Step) -> None:
        if self._is_here():
            self._now = self._now or TRAINING
            self._end(step.peak)
            self._begin()

    def _is_here(self) -> bool:
        here = os.getpid(), threading.get_ident()
        return here == self._here and not torch.compiler.is_compiling()

    def _begin(self) -> None:
        driver = self._driver
        with driver.lock:
            self._start = driver.engine.memory
            self._part = driver.also_capture()

    def _end(self, peak: Bytes) -> None:
        """End the part and judge it. `peak` bounds the memory (bytes) that it used."""
        part, self._part = self._part, None
        if part is None:
            return
        driver = self._driver
        with driver.lock:
            driver.capture_no_more()
        self._judge(self._phases.setdefault(self._now, _Phase()), part, peak)

    def _judge(self, phase: _Phase, part: Any, peak: Bytes) -> None:
        """Simulate the part, if it may need more than earlier parts."""
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
