"""Sections of the page of benchmarks: what a step takes, and how little it can do with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from _tables import cell, load, said, several_runs, table_of


def section(title: str, found: dict[str, Any], text: str, table: Iterable[str]) -> str:
    parts = [f"## {title}", "", said(found), "", text, ""]
    return "\n".join([*parts, *table, "", *several_runs(found["rows"])]).rstrip() + "\n"


def breakdown() -> str:
    found = load("breakdown")
    if not found:
        return ""
    parts = ("bookkeeping", "recomputation", "choosing", "other")
    rows = [
        [row["model"], row["core"], cell(row["time"]), *(f"{row[part]:+.3f}" for part in parts)]
        for row in found["rows"]
        if "time" in row
    ]
    text = (
        f"At {found['fraction']:.0%} of the activations, in times of the plain step: what watching "
        "adds without a limit, the operators that ran again, choosing what to let go, and the rest."
    )
    heads = ["model", "core", "time over plain", *parts]
    return section("Where the time of a step goes", found, text, table_of(heads, rows))


def cap() -> str:
    found = load("cap")
    if not found:
        return ""
    measured = [row for row in found["rows"] if "over" in row]
    ways = list(dict.fromkeys(row["way"] for row in measured))
    by_key = {(row["model"], row["fraction"], row["way"]): row for row in measured}
    points = dict.fromkeys((row["model"], row["fraction"]) for row in measured)
    rows = [
        [model, f"{fraction:.0%}", *(_first_and_later(by_key.get((model, fraction, way)))
                                     for way in ways)]
        for model, fraction in points
    ]  # fmt: skip
    text = (
        "The peak by the allocator's own events over the budget: of the first step / of later ones."
    )
    heads = ["model", "activations", *(way.removeprefix("rekindle ") for way in ways)]
    return section("A cap that is a cap", found, text, table_of(heads, rows))


def _first_and_later(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['first']:.3f} / {row['over']:.3f}"


def floors() -> str:
    found = load("floors")
    if not found:
        return ""
    kinds = ("held", "simulated", "real")
    rows = [
        [row["model"], f"{row['bound'] / 1e6:.1f}", *(cell(row[f"{kind}_over_bound"])
                                                      for kind in kinds), row["short_of_room"]]
        for row in found["rows"]
        if "bound" in row
    ]  # fmt: skip
    text = (
        "What no schedule of a whole step can be below; over that, the same with what the "
        "program's own variables hold, and the smallest budgets by simulation and in earnest; and "
        "who has no room below that."
    )
    heads = ["model", "bound, MB", "with what is held", "simulated", "real", "short of room"]
    return section("The smallest budgets", found, text, table_of(heads, rows))


def restarts() -> str:
    found = load("restarts")
    if not found:
        return ""
    measured = [row for row in found["rows"] if "restarts" in row]
    again = [row for row in measured if row["restarts"]]
    rows = [
        [row["model"], f"{row['fraction']:.0%}", row["restarts"], f"{row['last']:.0%}",
         f"{row['floor']:.0%}"]
        for row in again
        if " " not in row["model"] or row["restarts"] > 1
    ]  # fmt: skip
    zoo = Counter(row["restarts"] for row in measured if " " in row["model"])
    of_zoo = ", ".join(f"{count} took {number}" for number, count in sorted(zoo.items()))
    text = (
        "How often a script is started again that follows what `OutOfBudget` says, from a budget "
        f"that is too small: {len(measured) - len(again)} rows where it was enough are left out. "
        "Budgets are shares of the activations."
    )
    if zoo:
        text += f" Of {zoo.total()} architectures of the zoo {of_zoo}."
    heads = ["model", "first budget", "restarts", "budget that did", "smallest that does"]
    return section("Starting again with more", found, text, table_of(heads, rows))
