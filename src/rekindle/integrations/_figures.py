"""Compute the figures of a run that frameworks log. Most cover the time since the previous log.

The integrations of Hugging Face and Lightning use this module.
"""

from __future__ import annotations

from typing import final

from rekindle.pytorch import Run, budget

Amount = str | int | budget
"""Bytes as int or text, or a `rekindle.budget(...)` with options that is not entered yet."""


def entered(amount: Amount) -> budget:
    """Make a `budget` context for one training. A given `budget` is copied, for reuse."""
    return amount.copy() if isinstance(amount, budget) else budget(amount)


@final
class Figures:
    """Figures of one run: bytes, counts, and time lost to recomputation in % of computation."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = (0, 0, 0, 0)

    def since_last(self, prefix: str) -> dict[str, float]:
        """Return the figures since the previous call. Only the peak is that of the whole run.

        Args:
            prefix: The beginning of each name.
        """
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
