"""Judge the cases of one entry of a database, and check the lists of exceptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tests.differ.modes import Evict
from tests.differ.tally import Tally
from tests.pytorch.sweep._exceptions import NOT_HERE, NOTHING_TO_RECOMPUTE, Exempt
from tests.pytorch.sweep._verdict import Case


def tally(
    entry: str,
    cases: Iterable[Case],
    exempt: Mapping[str, Exempt],
    *,
    every: bool = True,
    evict: Evict = "saved",
) -> Tally:
    """Run the cases of one entry; `every`: True if these are all of its cases."""
    found = Tally()
    allowed = exempt[entry].kind if entry in exempt else "same"
    for case in cases:
        verdict = case.judge(evict)
        found.kinds[verdict.kind] += 1
        found.again += verdict.again
        found.recomputed += bool(verdict.again)
        if verdict.kind not in ("same", "refused", allowed):
            found.failures.append(f"{case}: {verdict.kind}: {verdict.detail}")
    if found.tried == 0:
        found.refused.append(entry)
    elif not found.again:
        found.idle.append(entry)
    found.failures += [
        f"{entry}: {complaint}" for complaint in _unlisted(entry, found, every, evict)
    ]
    return found


def _unlisted(entry: str, found: Tally, every: bool, evict: Evict) -> Iterator[str]:
    """Yield complaints if the lists of entries without samples or recomputations are wrong."""
    if found.refused and every and entry not in NOT_HERE:
        yield "PyTorch refuses every sample"
    if found.tried and entry in NOT_HERE:
        yield "a sample runs: take it from NOT_HERE"
    if found.idle and every and entry not in NOTHING_TO_RECOMPUTE:
        yield "nothing was ever recomputed"
    if found.again and every and entry in NOTHING_TO_RECOMPUTE and evict == "saved":
        yield "something was recomputed: take it from NOTHING_TO_RECOMPUTE"
