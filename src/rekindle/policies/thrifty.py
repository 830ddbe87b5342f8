"""h_DTR with the descendants capped and the staleness damped.

score = (c0(s) + C_up(s) + min(C_down(s), 2/3 c0(s))) / (m(s) * sqrt(staleness(s)))

with C_up and C_down the costs of the evicted ancestors and descendants of e*(s) (DTR, Kirisame et
al., ICLR 2021, section 4.1, where the numerator is c0 + C_up + C_down and the staleness counts in
full). Why it differs:

- What letting s go costs is c0 + C_up, each time that s is wanted. Its evicted descendants are to
  be recomputed in any case; that s is gone as well does not make them dearer, it makes s wanted
  once more, for c0 - or not, where it is still there when its own turn comes. h_DTR counts them in
  full, so what lies above a long evicted region looks so precious that it stays, and under a tight
  budget there is nothing else left to let go. Two thirds lie between: without descendants a GPT
  recomputes 0.081 of its computation at one half, with two thirds 0.094, with all of c0 0.111,
  while the DTR paper's TreeLSTM recomputes 0.137, 0.104 and 0.104.
- Staleness stands for the time to the next use. For what a backward pass reads, last in first out,
  it is right; for weights' neighbors or skip connections it is not, and grows without bound. MSPS,
  which ignores it, is better where memory is tight and worse where it is not; the root is between.

Both were chosen on the DTR paper's logs and on steps of eight models. There 18 % less is recomputed
than by h_DTR (geometric mean; in 22 of 24 cases less); in 13 architectures of the zoo, on which
nothing was chosen, 8 % less (in 25 of 39 cases less, in 12 more; benchmarks/policies.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle.policies._base import Chooser, Policy
from rekindle.policies._neighborhood import Exact
from rekindle.policies._scored import ScoredChooser


@final
@dataclass(frozen=True, slots=True)
class Thrifty(Policy):
    """Evict what is cheap to recompute, large, and long unused. The default.

    It is the DTR paper's heuristic with two changes: evicted descendants count less, and staleness
    counts by its square root.
    """

    def bind(self) -> Chooser:
        neighborhood = Exact(descendants="capped")
        return ScoredChooser(neighborhood, by_size=True, by_staleness=True, root=True)
