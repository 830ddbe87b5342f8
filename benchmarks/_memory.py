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
        f"The table splits the time of a step within {found['fraction']:.0%} of the activations "
        "into parts, each divided by the time of the step in plain PyTorch. *Bookkeeping* is the "
        "time that a budget without a limit adds. *Choosing* is the time to select the values to "
        "evict. *Other* is the rest, and can be negative because times vary."
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
        "Inside a budget Rekindle records each operator, so that its results can be recomputed. "
        "The table shows the microseconds that plain PyTorch takes for an operator, and those that "
        "a budget adds, recomputation included. Recording takes the same time for small and large "
        "operators, so it is a larger part of a step with small operators."
    )
    heads = ["model", "activations", "operators", "plain, us", "added, us", "time over plain"]
    books = [
        [row["case"], row["operators"], row["bytes_per_operator"], f"{row['share_of_memory']:.1%}"]
        for row in found["bookkeeping"]
    ]
    after = (
        "The next table shows the memory of these records at the end of a first forward pass, and "
        "its share of the counted memory peak. Records of weights are included."
    )
    about = ["model", "operators", "bytes for each operator", "share of the peak"]
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
        "What does a budget cost at the beginning of a run? The figures are times of a step, "
        "divided by its time in plain PyTorch, within a budget of 4 GiB in which nothing is "
        "evicted. *Around each* has a new budget around each step. *First* and *tenth* are steps "
        "within one budget. *Empty* is the time to enter and leave a budget in which nothing "
        "runs. *Modules* is the number of `nn.Module`s."
    )
    if before:
        text += " Figures in parentheses are those of an earlier commit on the same machine."
    heads = ["model", "modules", "plain, ms", "around each", "first", "tenth", "empty, ms"]
    parts = [section("The first minute", found, text, table_of(heads, rows))]
    if "run" in found:
        run = found["run"]
        parts.append(
            "A script that only imports torch takes "
            f"{cell(run['plain_s']['median'])} s of processor time, and under `rekindle run` "
            f"{cell(run['run_s']['median'])} s."
        )
    if "build" in found:
        parts.append(
            f"`rekindle build` with an empty cache: {found['build']['processor']:.0f} s of "
            "processor time."
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
        "Several Python threads share one budget, and each trains its own model. The elapsed time "
        "and the processor time are divided by those of the same number of threads in plain "
        "PyTorch. *Peak* is the highest memory peak divided by the budget. On a CPU, autograd "
        "starts no threads of its own."
    )
    heads = ["model", "threads", "activations", "elapsed time", "processor time", "peak"]
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
        "Is the budget ever exceeded? Each cell has up to three numbers, all divided by the "
        "budget: the memory peak of the first step, the peak of later steps, and, if measured, the "
        "growth of the process's resident memory. Peaks are measured by the allocator's events. "
        "Only *online* and *learned* limit the resident memory."
    )
    heads = ["model", "activations", *(way.removeprefix("rekindle ") for way in ways)]
    return section("A cap that is a cap", found, text, table_of(heads, rows))


def _first_and_later(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    resident = f" / {row['resident']:.2f}" if "resident" in row else ""
    return f"{row['first']:.3f} / {row['over']:.3f}{resident}"


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
        "How small can a budget be? *Bound* is a proven lower bound: no schedule of the step needs "
        "less. The next three columns are divided by that bound. *With variables* is the bound if "
        "tensors that variables hold are not evicted. *Simulated* and *real* are the smallest "
        "budgets of a simulated and of a real run. The last column names the operator that does "
        "not fit into a smaller budget."
    )
    heads = ["model", "bound, MB", "with variables", "simulated", "real", "operator"]
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
        "The figures are the smallest budget, as a share of the activations, of a LLaMA whose "
        "parts are `autograd.Function`s in the style of a library. In the column *as they are*, "
        "the functions are not recomputed. In *as units*, each function is recomputed as one "
        "operator (`rekindle.recomputable`). *First steps* is the smallest budget of such "
        "functions in the first steps of a new process, which must try each function before "
        "recomputing it. *One backward pass* is the memory that the largest backward pass of a "
        "function needs. The last two columns are for a budget of 35 %: the number of recomputed "
        "functions, and if the bits equal plain PyTorch's. The functions were written for this "
        "table, without the libraries."
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
        "How often must a script be started until its budget suffices? A script starts with a "
        "budget that is too small. After each `OutOfBudget` it starts again with the budget that "
        "the error suggests. The table shows the number of restarts, the last budget, and the "
        "smallest budget with which the script runs. Budgets are shares of the activations. "
        f"{len(measured) - len(again)} rows whose first budget sufficed are left out, and so are "
        "architectures that took one restart."
    )
    if zoo:
        text += f" Restarts of {zoo.total()} architectures of transformers and diffusers: {of_zoo}."
    heads = ["model", "first budget", "restarts", "last budget", "smallest budget"]
    return section("Restarts after OutOfBudget", found, text, table_of(heads, rows))


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
        "PyTorch's CUDA allocator reserves more memory than tensors use, because it rounds sizes "
        "and keeps free pieces. The figures are simulated, by models of the allocator that were "
        "not compared with a device yet. Each cell of the first table has two figures, for the "
        "default allocator and for `expandable_segments:True`: the peak of reserved memory, "
        "divided by the peak of memory in use. The columns are budgets, as shares of the peak when "
        f"everything is kept. Programs with a peak below {found['gigabytes']:.0f} GB were "
        "enlarged. An x marks a program that fails or recomputes too long."
    )
    limited = (
        "The second table shows recomputation time divided by computation time, on a device with "
        "1.05 or 1.2 times the memory of the budget. If an allocation fails because no free piece "
        "is large enough, the simulator evicts values one by one in the order of their score "
        "(*score*), or the cheapest values at adjacent addresses (*window*). *By sums* ignores "
        f"addresses. {len(costs) - len(costly)} of {len(costs)} rows are left out, because "
        "addresses cost no time there."
    )
    count = (
        "The third table counts cases (a program and a budget) by outcome: *window* has less or "
        "more recomputation than *score*, one of them fails, or *window* has no more than if "
        "addresses are ignored. *Better* and *worse* mean a difference of at least a thousandth of "
        "the computation time."
    )
    ways = [" ".join(map(str, way)) for way in _WAYS]
    parts = ["## Memory that an allocator takes in addition", "", said(found), "", text, ""]
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
        "Some backward operators write their result over their incoming gradient, if nothing else "
        "reads that gradient. The table compares the memory peak and the number of recomputed "
        "operators with and without such writes. Budgets are shares of the activations without "
        "such writes. All bits are equal."
    )
    heads = ["model", "budget", "peak MB, new memory", "peak MB, in place",
             "recomputed, new memory", "recomputed, in place"]  # fmt: skip
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
        "The program is a loop of thousands of steps `x = normalize(c @ x)`, and a backward pass "
        "through all of them. Budgets are shares of the activations. *Checkpoint* is "
        "`torch.utils.checkpoint` around pieces of sqrt(n) of the n steps. Times are processor "
        "times."
    )
    heads = ["steps", "method", "peak MiB", "time over plain", "recomputed operators", "same bits"]
    return section("Long loops", found, text, table_of(heads, rows))
