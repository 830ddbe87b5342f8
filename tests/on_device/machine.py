"""A device, or the CPU in its place: measure the memory and the time of programs on it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

import rekindle

Line = dict[str, Any]

#: A function that returns a model and a function that makes one training step.
Program = Callable[["Machine"], tuple[Any, Callable[[], None]]]


@final
@dataclass(frozen=True)
class Took:
    """The result of a run.

    Attributes:
        values: Parameters and buffers afterwards.
        peak: The peak of memory, in bytes.
        constant: Bytes that are still in use at the end.
        run: The `Run`, if there was a budget.
    """

    values: list[Tensor]
    peak: int
    constant: int
    run: Any = None

    def budget(self, share: float) -> int:
        """Return a budget: the constant memory, and a fraction `share` of the temporary memory."""
        return self.constant + int(share * (self.peak - self.constant))


@final
class Machine:
    """A kind of device, "cuda" or "cpu".

    Args:
        kind: The kind of device.
        tiny: True for a rehearsal with tiny programs.
        quick: True to time only what shows the effect of memory.
    """

    def __init__(self, kind: str, *, tiny: bool, quick: bool = False) -> None:
        self.kind = kind
        self.tiny = tiny
        self.quick = quick
        self.is_cuda = kind == "cuda"

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def trained(
        self, program: Program, steps: int = 3, amount: int | None = None, **options: Any
    ) -> Took:
        """Run `steps` steps of `program`, within a budget if `amount` is given."""
        torch.manual_seed(0)
        self.start_anew()
        model, step = program(self)
        watch = nullcontext() if self.is_cuda and amount is None else self._context(amount, options)
        with watch as run:
            for _ in range(steps):
                step()
            peak = self._peak(run)
        constant = torch.cuda.memory_allocated() if self.is_cuda else run._driver.engine.memory
        values = [value.detach().cpu() for value in model.state_dict().values()]
        values.append(torch.get_rng_state())
        if self.is_cuda:
            values.append(torch.cuda.get_rng_state())
        return Took(values, peak, constant, run)

    def within(
        self, program: Program, amount: int, steps: int = 3, **options: Any
    ) -> tuple[Took, int]:
        """Train within `amount` bytes, or within the first budget suggested by errors that works.

        Returns:
            The result, and the budget that worked.
        """
        refusals: list[str] = []
        for _ in range(12):
            try:
                return self.trained(program, steps, amount, **options), amount
            except rekindle.OutOfBudget as error:
                refusals.append(f"{amount}: {str(error)[:300]}")
                amount = max(error.rehearse(), amount + 1)
        raise RuntimeError(f"the smallest budget grew too often: {refusals}")

    def timed(self, step: Callable[[], object], count: int) -> tuple[list[float], float]:
        """Return the milliseconds of each of `count` steps, and the fraction until `step` returns.

        After `step` has returned, the host only waits for the device.
        """
        times, host = [], 0.0
        for _ in range(count):
            self.synchronize()
            began = time.perf_counter()
            step()
            returned = time.perf_counter()
            self.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
            host += 1e3 * (returned - began)
        return times, host / sum(times)

    def _context(self, amount: int | None, options: dict[str, Any]) -> Any:
        return rekindle.budget(amount, device=self.kind, **options)

    def start_anew(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()
            # cuBLAS has one workspace for each stream that was used
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _peak(self, run: Any) -> int:
        if not self.is_cuda:
            return run.peak
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def check(name: str, ok: bool, **more: Any) -> Line:
    """Return a finding that states whether a condition holds."""
    return {"check": name, "ok": bool(ok), **more}


def refusal(error: BaseException | None) -> rekindle.Unsupported | None:
    """Return the `Unsupported` among the causes of an error, or None."""
    while error is not None and not isinstance(error, rekindle.Unsupported):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def switched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute to another value while the context is open."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
