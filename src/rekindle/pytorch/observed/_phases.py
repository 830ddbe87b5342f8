"""Which budgets would do for the phases of a whole run: training, evaluation, and all of it.

The run is cut into parts: where an optimizer makes a step, and where a model is called while there
is no more memory in use than at its call before, so that no graph crosses the cut. Each part is
written down and simulated, unless it cannot need more than parts before. A part without gradients
is evaluation (or sampling); the others are training.
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
#: Parts before the first call of a model: they count for the whole alone.
_BEFORE: Final = ""

MOST_PARTS: Final = 64
"""Of a phase; later ones are simulated only if they took more memory than all before."""


@final
@dataclass(slots=True)
class _Phase:
    """What its parts needed."""

    smallest: Bytes = 0  #: what the simulator gets through all of them with
    peak: Bytes = 0  #: no part took more
    parts: int = 0  #: that were simulated
    seen: set[tuple[Bytes, Bytes]] = field(default_factory=set[tuple[Bytes, Bytes]])
    hardest: Trace | None = None  #: the part that needed `smallest`

    @property
    def named(self) -> Bytes:
        """The budget to name: with the margin, and never more than it took."""
        return min(self.peak, int((1 + Phases.MARGIN) * self.smallest))


@final
class Phases:
    """Watches a run without a limit, or with one that is large enough."""

    MARGIN: Final = 0.05
    """Added to what the simulator gets through with: it knows one part at a time, and takes what
    the part before left behind for what it is."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._driver: Any = run._driver
        self._phases: dict[str, _Phase] = {}
        self._now = _BEFORE
        self._part: Any = None
        self._start: Bytes = 0  # memory where the part begins
        self._at_call: Bytes = 0  # memory at the last call of a model
        self._depth = 0
        self._here = os.getpid(), threading.get_ident()

    @contextmanager
    def watch(self) -> Generator[None]:
        """Inside, all that runs is looked at."""
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
            if os.getpid() == self._here[0]:
                self._end(self._driver.engine.peak)

    # -- what it found ----------------------------------------------------------------------------

    @property
    def budgets(self) -> dict[str, Bytes]:
        """The smallest budget for each phase, with the margin."""
        return {name: phase.named for name, phase in self._phases.items() if name}

    @property
    def whole(self) -> Bytes:
        """The smallest budget for all of the run, with the margin; 0: nothing ran."""
        return max((phase.named for phase in self._phases.values()), default=0)

    def other_budgets(self, points: int) -> list[tuple[Bytes, float]]:
        """Budgets for the hardest part of training, and what recomputation adds to its time."""
        phase = self._phases.get(TRAINING) or self._phases.get(_BEFORE)
        trace = None if phase is None else phase.hardest
        if trace is None:
            return []
        compute_ns = max(1, trace.compute_ns)
        found = curve(trace, self._run.policy, points=points)
        return [(point.budget, point.recompute_ns / compute_ns) for point in found]

    # -- where it is cut --------------------------------------------------------------------------

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
        """`peak`: the part took no more than that."""
        part, self._part = self._part, None
        if part is None:
            return
        driver = self._driver
        with driver.lock:
            driver.capture_no_more()
        self._judge(self._phases.setdefault(self._now, _Phase()), part, peak)

    def _judge(self, phase: _Phase, part: Any, peak: Bytes) -> None:
        """Simulates the part, if it may need more than those before."""
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
