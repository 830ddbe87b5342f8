"""What frameworks log of a run within a budget: figures of the time since they last asked."""

from __future__ import annotations

from typing import final

from rekindle.pytorch import Run, budget

Amount = str | int | budget
"""Bytes, or a `rekindle.budget(...)` with its options that nobody entered."""


def entered(amount: Amount) -> budget:
    """A context for one training; the one that was given stays as it is, for the next."""
    return amount.copy() if isinstance(amount, budget) else budget(amount)


@final
class Figures:
    """Of one run. Bytes, counts, and time lost to recomputation as percent of the computation."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = (0, 0, 0, 0)

    def since_last(self, prefix: str) -> dict[str, float]:
        """Names begin with `prefix`; the peak is that of the whole run."""
        run = self._run
        now = (run.evictions, run.recomputations, run.compute_ns, run.recompute_ns)
        before, self._before = self._before, now
        evictions, recomputations, compute, again = (
            new - old for new, old in zip(now, before, strict=True)
        )
        return {
            f"{prefix}peak_bytes": float(run.peak),
            f"{prefix}evictions": float(evictions),
            f"{prefix}recomputations": float(recomputations),
            f"{prefix}time_lost_percent": round(100 * again / compute, 2) if compute else 0.0,
        }
