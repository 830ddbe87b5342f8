"""Sections of the page of benchmarks on the memory of a step and on the smallest budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from _tables import cell, load, said, several_runs, table_of


def section(title: str, found: dict[str, Any], text: str, table: Iterable[str]) -> str:
    parts = [f"## {title}", "", said(found), "", text, ""]
    return "\n".join([*parts, *table, "", *several_runs(found.get("rows", []))]).rstrip() + "\n"


def breakdown() -> str:
    found = load("breakdown")
    if not found:
        return ""
    parts = ("bookkeeping", "recomputation", "choosing", "other")
    rows = [
        [row["model"], cell(row["time"]), *(f"{row[part]:+.3f}" for part in parts)]
        for row in found["rows"]
        if "time" in row
    ]
    text = (
        f"At {found['fraction']:.0%} of the activations, in times of the plain step: what watching "
        "adds without a limit, the operators that ran again, choosing what to let go, and the rest."
    )
    heads = ["model", "time over plain", *parts]
    return section("Where the time of a step goes", found, text, table_of(heads, rows))


def native() -> str:
    """Return the section on the time and the memory of recording."""
    found = load("native")
    if not found:
        return ""
    rows = [
        [
            row["case"],
            "no limit" if row["fraction"] is None else f"{row['fraction']:.0%}",
            row["operators_per_step"],
            cell(1e3 * row["plain_ms"]["median"] / row["operators_per_step"]),
            cell(row["native"]["added_us_per_operator"]["median"]),
            cell(row["native"]["ratio"]["median"]),
        ]
        for row in found["rows"]
    ]
    text = (
        "Microseconds of plain PyTorch for an operator, those that a budget adds to it, with what "
        "is computed again, and the time of a step over that of plain PyTorch. What is added for "
        "watching does not depend on how large an operator is: the smaller they are, the more it "
        "is of the step."
    )
    heads = ["model", "activations", "operators", "plain, us", "added, us", "time over plain"]
    books = [
        [row["case"], row["operators"], row["bytes_per_operator"], f"{row['share_of_memory']:.1%}"]
        for row in found["bookkeeping"]
    ]
    after = (
        "Bytes of books at the end of a first forward pass, those of weights included, and their "
        "share of the peak of what is counted:"
    )
    about = ["model", "operators", "bytes an operator", "share"]
    parts = ["## What recording adds", "", said(found), "", text, "", *table_of(heads, rows)]
    return "\n".join([*parts, "", after, "", *table_of(about, books)]) + "\n"


def first_minute() -> str:
    """Return the section on start-up costs, with the figures before they were improved."""
    found = load("first_minute")
    if not found:
        return ""
    before = {row["model"]: row for row in load("first_minute_before").get("rows", ())}
    rows = []
    for row in found["rows"]:
        earlier = before.get(row["model"], {})
        cells = [
            cell(row[part]["median"]) + (f" ({earlier[part]['median']:.2f})" if earlier else "")
            for part in ("each", "first", "tenth", "empty_ms")
        ]
        rows.append([row["model"], row["modules"], cell(row["plain_ms"]["median"]), *cells])
    text = (
        "A budget of 4 GiB, in which nothing is evicted: the time of a step over that of plain "
        "PyTorch with a budget around each step, and of the first and the tenth step within one; "
        "milliseconds to enter and leave a budget in which nothing runs."
    )
    if before:
        text += " In parentheses the same at an earlier commit, on the same machine."
    heads = ["model", "modules", "plain, ms", "around each", "first", "tenth", "empty, ms"]
    parts = [section("The first minute", found, text, table_of(heads, rows))]
    if "run" in found:
        run = found["run"]
        parts.append(
            "A script that only imports torch takes "
            f"{cell(run['plain_s']['median'])} s of the processor, and under `rekindle run` "
            f"{cell(run['run_s']['median'])} s."
        )
    if "build" in found:
        parts.append(
            f"`rekindle build` with an empty cache: {found['build']['processor']:.0f} s of the "
            "processor."
        )
    return "\n".join(parts) + "\n"


def threads() -> str:
    found = load("threads")
    if not found:
        return ""
    rows = [
        [
            row["case"],
            row["threads"],
            "no limit" if row["fraction"] is None else f"{row['fraction']:.0%}",
            cell(row["elapsed"]["median"]),
            cell(row["processor"]["median"]),
            f"{row['peak_over_budget']['max']:.3f}" if "peak_over_budget" in row else "",
        ]
        for row in found["rows"]
    ]
    text = (
        "Threads of Python's, each with a model of its own, all within one budget: "
        "the time over that of as many threads of plain PyTorch, by the clock and by the "
        "processor, and the highest peak over the budget. On a CPU autograd has no threads of its "
        "own."
    )
    heads = ["model", "threads", "activations", "by the clock", "by the processor", "peak"]
    return section("Several threads", found, text, table_of(heads, rows))


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


def functions() -> str:
    found = load("functions")
    if not found:
        return ""
    rows = [
        [row["style"], f"{row['kept']['smallest']:.1%}", f"{row['units']['smallest']:.1%}",
         f"{row['units']['first']:.1%}", f"{row['units']['backward_alone']:.1%}",
         row["units"]["recomputed"], "yes" if row["units"]["equal"] else "no"]
        for row in found["rows"]
    ]  # fmt: skip
    text = (
        "The smallest budget of a LLaMA whose parts are `autograd.Function`s in the style of a "
        "library, as a share of its activations: as they are, after `rekindle.recomputable`, and "
        "in a new process where all is still to be tried; what the largest backward pass of a "
        "function needs alone; and, at 35 %, what is recomputed and whether gradients have the "
        "same bits. The functions were written for this table; no library was installed."
    )
    heads = ["style", "as they are", "as units", "first steps", "one backward pass", "recomputed",
             "same bits"]  # fmt: skip
    return section("Models made of functions", found, text, table_of(heads, rows))


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


def fragmentation() -> str:
    found = load("fragmentation")
    if not found:
        return ""
    rows, counted = found["rows"], found["summary"]
    by_key = {(row["program"], row["ratio"]): row for row in rows}
    programs, ratios = (list(dict.fromkeys(key[i] for key in by_key)) for i in (0, 1))
    reserved = [[name, *(_reserved(by_key[name, at]) for at in ratios)] for name in programs]
    costs = [[row["program"], f"{row['ratio']:.0%}", *_recomputed(row)] for row in rows]
    costly = [row for row in costs if set(row[3:]) != {row[2]}]
    text = (
        "Simulated, by models of PyTorch's allocator for CUDA that were not compared with a device "
        "yet. What it reserves at most, over the most that is in use, on a device without a limit: "
        "as it is by default, with `expandable_segments:True`. Budgets are shares of what keeping "
        f"everything takes; programs where that is less than {found['gigabytes']:.0f} GB were "
        "enlarged."
    )
    limited = (
        "Recomputation over computation on a device of 1.05 or 1.2 times the budget, where an "
        "allocation that fails is answered by evicting by score, one after another, or the "
        "cheapest window of neighbors (x: does not get through). Left out are "
        f"{len(costs) - len(costly)} of {len(costs)} rows, in which places in memory cost nothing."
    )
    count = "Where sums alone get through; better or worse by a thousandth of the computation:"
    ways = [" ".join(map(str, way)) for way in _WAYS]
    parts = ["## What an allocator takes beside the sum", "", said(found), "", text, ""]
    parts += [*table_of(["program", *(f"{at:.0%}" for at in ratios)], reserved), ""]
    parts += [limited, "", *table_of(["program", "budget", "by sums", *ways], costly), ""]
    heads = ["device", *next(iter(counted.values()))]
    parts += [count, "", *table_of(heads, [[name, *of.values()] for name, of in counted.items()])]
    return "\n".join(parts) + "\n"


_WAYS = [
    (kind, share, repair)
    for kind in ("native", "expandable")
    for share in (1.05, 1.2)
    for repair in ("score", "window")
]


def _reserved(row: dict[str, Any]) -> str:
    figures = [row[kind]["reserved"] for kind in ("native", "expandable")]
    return "x" if None in figures else ", ".join(map(cell, figures))


def _recomputed(row: dict[str, Any]) -> list[str]:
    figures = [row["sums"], *(row[kind][f"{repair} {share}"] for kind, share, repair in _WAYS)]
    return ["x" if figure is None else f"{figure:.3f}" for figure in figures]


def in_place() -> str:
    """Return the section on results that are written over a gradient."""
    found = load("in_place")
    if not found:
        return ""
    rows = []
    for model, measured in found["models"].items():
        for row in measured:
            without, within = row["new memory"], row["in place"]
            limit = "none" if row["fraction"] is None else f"{row['fraction']:.0%}"
            rows.append(
                [model, limit,
                 f"{without['peak'] / 1e6:.1f}" if without else "out of budget",
                 f"{within['peak'] / 1e6:.1f}" if within else "out of budget",
                 without["recomputed_operators"] if without else "",
                 within["recomputed_operators"] if within else ""]
            )  # fmt: skip
    text = (
        "Some backward operators write their result over a gradient that nothing else reads. "
        "Budgets are fractions of the activation memory without that. All bits are equal."
    )
    heads = ["model", "budget", "peak MB, new memory", "in place", "recomputed, new memory",
             "in place"]  # fmt: skip
    return section("Results in place of gradients", found, text, table_of(heads, rows))


def loops() -> str:
    """Return the section on long eager loops."""
    found = load("loops")
    if not found:
        return ""
    rows = [
        [f"{row['steps']:,}", row["way"],
         f"{row['peak'] / 2**20:.1f}" if row["peak"] else "",
         f"{row['over plain']:.2f}",
         f"{row['recomputations']:,}" if row["recomputations"] is not None else "",
         "yes" if row["same bits"] else "no"]
        for row in found["rows"]
    ]  # fmt: skip
    text = (
        "`x = normalize(c @ x)`, thousands of times, and a gradient through all of it. Budgets "
        "are fractions of the activations; *checkpoint* is `torch.utils.checkpoint` around pieces "
        "of sqrt(n) steps. Processor time."
    )
    heads = ["steps", "way", "peak MiB", "time over plain", "recomputed operators", "same bits"]
    return section("Long loops", found, text, table_of(heads, rows))
