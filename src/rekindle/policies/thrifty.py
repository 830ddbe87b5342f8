"""The default policy: h_DTR with capped descendants and damped staleness.

    score(s) = (c0(s) + C_up(s) + min(C_down(s), 2/3 c0(s))) / (m(s) * sqrt(staleness(s)))

C_up and C_down are the costs of the evicted ancestors and descendants in e*(s). In h_DTR (Kirisame
et al., ICLR 2021, section 4.1) the numerator is c0 + C_up + C_down, and the staleness counts in
full. The two changes:

- **Descendants are capped.** Evicting s costs c0 + C_up each time s is needed. Its evicted
  descendants must be recomputed in any case. Evicting s does not make them costlier: it only makes
  s needed once more, for c0. h_DTR counts them in full. A storage above a long evicted region then
  looks too precious to evict, and under a tight budget nothing else is left. The cap of 2/3 is a
  compromise. Within half of its memory, the recomputation time of a GPT is 0.081 of its computation
  time if descendants do not count, 0.094 with the cap 2/3, and 0.111 with the cap 1. For the DTR
  paper's TreeLSTM the figures are 0.137, 0.104 and 0.104.
- **Staleness is damped.** Staleness predicts the time until the next use. The prediction is right
  for values that a backward pass reads in reverse order. It is wrong for skip connections and for
  values next to weights, and it grows without bound. MSPS ignores staleness: it is better where
  memory is tight and worse elsewhere. The square root lies between the two.

C_up counts at most the average cost of 1,000 evicted storages: in a long loop, a storage may have
tens of thousands of evicted ancestors, and the policy would visit them for each choice.

Both changes were tuned on the DTR paper's logs and on steps of eight models. On these the policy
recomputes 22 % less than h_DTR (geometric mean; less in 19 of 24 cases, more in 3). On 13 further
architectures, which were not used for tuning, it recomputes 20 % less (less in 30 of 39 cases, more
in 7; `benchmarks/policies.py`).
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
        neighborhood = Exact(counted="capped")
        return ScoredChooser(neighborhood, by_size=True, by_staleness=True, root=True)
