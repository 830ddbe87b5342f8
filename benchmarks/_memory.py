"""Write the sections of docs/benchmarks.md on start-up costs, smallest budgets and memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from _tables import cell, load, said, several_runs, table_of


def section(title: str, found: dict[str, Any], text: str, table: Iterable[str]) -> str:
    parts = [f"## {title}", "", said(found), "", text, ""]
    return "\n".join([*parts, *table, "", *several_runs(found.get("rows", []))]).rstrip() + "\n"


def _budget(fraction: float | None) -> str:
    """Return the cell for a budget that is a fraction of the activations; None: no limit."""
    if fraction is None:
        return "no limit"
    return f"{fraction:.0%}" if fraction <= 1 else f"{fraction} times"


def native() -> str:
    """Return the section on the time and the memory of recording."""
    found = load("native")
    if not found:
        return ""
    rows = [
        [
            row["case"],
            _budget(row["fraction"]) + (", learned" if row["learned"] else ""),
            row["operators_per_step"],
            cell(1e3 * row["plain_ms"]["median"] / row["operators_per_step"]),
            cell(row["native"]["added_us_per_operator"]["median"]),
            cell(row["native"]["ratio"]["median"]),
            cell(guided["native"]["ratio"]["median"]),
        ]
        for row, guided in zip(found["rows"], found["guided"], strict=True)
    ]
    text = (
        "Inside a budget Rekindle records each operator, so that its results can be recomputed. "
        "*Operators* is the number of operators in a step. *Plain* is the average time of an "
        "operator in plain PyTorch. *Added* is the time that a budget adds to each operator, "
        "recomputation included. *No limit* is a budget without a limit, which evicts nothing. "
        "*32 times* is a budget of which a step needs less than a twentieth. After some thousand "
        "operators Rekindle then only counts their memory. "
        "*Learned* is a budget that follows a learned plan. Recording takes about the same time "
        "for small and large operators, so the relative cost is higher in a model with small "
        "operators. *Guided* is the time over plain with the core that `rekindle build --guided` "
        "compiles: the compiler arranges its code by counts from the training of an LSTM, a "
        "transformer and a convolutional network."
    )
    heads = [
        *("model", "activations", "operators", "plain, us", "added, us"),
        *("time over plain", "guided"),
    ]
    books = [
        [row["case"], row["operators"], row["bytes_per_operator"], f"{row['share_of_memory']:.1%}"]
        for row in found["bookkeeping"]
    ]
    after = (
        "The next table shows how much memory these records take at the end of a first forward "
        "pass: in bytes for each operator, and as a share of the memory peak of all tensors. "
        "Records of weights are included."
    )
    about = ["model", "operators", "bytes for each operator", "share of the peak"]
    parts = ["## What recording adds", "", said(found), "", text, "", *table_of(heads, rows)]
    return "\n".join([*parts, "", after, "", *table_of(about, books)]) + "\n"


def first_minute() -> str:
    """Return the section on start-up costs, with figures of a commit before an improvement."""
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
        "What does a budget cost at the beginning of a run? The budget is 4 GiB, so nothing is "
        "evicted. Three columns are the time of a step divided by its time in plain PyTorch: "
        "*around each* has a new budget around each step; *first* and *tenth* are the first and "
        "the tenth step within one budget. *Empty* is the time to enter and leave a budget in "
        "which nothing runs. *Modules* is the number of `nn.Module`s of the model."
    )
    if before:
        text += " Figures in parentheses are of an earlier commit on the same machine."
    heads = ["model", "modules", "plain, ms", "around each", "first", "tenth", "empty, ms"]
    parts = [section("The first minute", found, text, table_of(heads, rows))]
    if "processes" in found:
        parts.append(_new_processes(found["processes"]))
    if "run" in found:
        run = found["run"]
        parts.append(
            "A script that only imports torch takes "
            f"{cell(run['plain_s']['median'])} s of processor time with `python`, and "
            f"{cell(run['run_s']['median'])} s with `rekindle run`."
        )
    if "build" in found:
        parts.append(
            f"`rekindle build` with an empty cache: {found['build']['processor']:.0f} s of "
            "processor time."
        )
    return "\n".join(parts) + "\n"


def _new_processes(found: list[dict[str, Any]]) -> str:
    """Return the table of the first steps of new processes."""
    text = (
        "The models above had run before. In a new process no operator is known, and the optimizer "
        "has no state. The columns are the times of the first three steps of such a process, "
        "divided by those of another new process in plain PyTorch (`--parts processes`, commit "
        f"`{found[0]['commit'][:9]}`)."
    )
    rows = [
        [
            row["model"],
            cell(row["plain_ms"][0]["median"]),
            *(cell(each["median"]) for each in row["ratios"]),
        ]
        for row in found
    ]
    heads = ["model", "plain first step, ms", "first", "second", "third"]
    return "\n".join(["", text, "", *table_of(heads, rows), ""])


def threads() -> str:
    found = load("threads")
    if not found:
        return ""
    rows = [
        [
            row["case"],
            row["threads"],
            _budget(row["fraction"]),
            cell(row["elapsed"]["median"]),
            cell(row["processor"]["median"]),
            f"{row['peak_over_budget']['max']:.3f}" if "peak_over_budget" in row else "",
        ]
        for row in found["rows"]
    ]
    text = (
        "Several Python threads share one budget, and each trains its own model. The elapsed time "
        "and the processor time are divided by those of the same number of threads in plain "
        "PyTorch. *Peak* is the highest memory peak divided by the budget. *No limit* is a budget "
        "without a limit. *32 times* is a budget of which a step needs less than a twentieth. On a "
        "CPU, autograd runs each backward pass in the thread that calls it, so there are no other "
        "threads."
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
        "growth of the process's resident memory. Peaks are computed from the allocations and "
        "frees that PyTorch's profiler reports. Only *online* and *learned* limit the resident "
        "memory. Threads and libraries add a constant amount to it, so it exceeds small budgets. "
        "The second column is the budget, as a share of the activations."
    )
    heads = ["model", "activations", *(way.removeprefix("rekindle ") for way in ways)]
    return section("A cap that is a cap", found, text, table_of(heads, rows))


def _first_and_later(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    resident = f" / {row['resident']:.2f}" if "resident" in row else ""
    return f"{row['first']:.3f} / {row['over']:.3f}{resident}"


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
        "and keeps free pieces. How much more? The figures are simulated, by models of the "
        "allocator that were not compared with a device yet. A cell of the first table has two "
        "figures: the peak of reserved memory divided by the peak of the tensors' memory, with the "
        "default allocator and with `expandable_segments:True`. The columns are budgets, as shares "
        "of "
        "the peak when everything is kept. All tensors of a program with a peak below "
        f"{found['gigabytes']:.0f} GB were enlarged until its peak was that large. An x marks a "
        "program that fails within the budget, or recomputes for too long."
    )
    limited = (
        "The second table shows how much time such free pieces cost: recomputation time divided by "
        "computation time, on a device whose memory is 1.05 or 1.2 times the budget. *Native* is "
        "the default allocator, and *expandable* is `expandable_segments:True`. If an allocation "
        "fails because no free piece is large enough, the simulator evicts values: one by one in "
        "the order of their score (*score*), or the cheapest values at adjacent addresses "
        "(*window*). The column *by sums* is for an ideal allocator, which succeeds whenever "
        f"enough memory is free in total. {len(costs) - len(costly)} of {len(costs)} rows are left "
        "out, because all their columns are equal."
    )
    count = (
        "The third table counts the outcomes of all cases (a case is a program and a budget). "
        "*Better* and *worse* mean that *window* recomputes less or more than *score*, with a "
        "difference of more than a thousandth of the computation time. *As by sums* counts the "
        "cases in which *window* recomputes no more than *by sums*."
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
        "`torch.utils.checkpoint` around each sqrt(n) consecutive steps of a loop of n steps. "
        "Times are processor times."
    )
    heads = ["steps", "method", "peak MiB", "time over plain", "recomputed operators", "same bits"]
    return section("Long loops", found, text, table_of(heads, rows))
