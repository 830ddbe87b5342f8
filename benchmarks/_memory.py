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
        "Rekindle records each operator of a budget. *Plain* and *added* are the times of an "
        "operator in plain PyTorch, and what a budget adds, recomputation included. *No limit* "
        "evicts nothing. *32 times*: a step needs less than a twentieth, so after some "
        "thousand operators Rekindle only counts. *Guided*: the time over plain with the core "
        "that `rekindle build --guided` compiles, by counts from the training of an LSTM, a "
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
        "The memory of these records after a first forward pass, those of weights included, and "
        "its share of the peak of all tensors:"
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
        "What does a budget cost at the beginning? It is 4 GiB, so nothing is evicted. Times "
        "over plain of a step in a budget of its own (*around each*), and of the first and "
        "tenth step in one budget; *empty* enters and leaves a budget in which nothing runs."
    )
    if before:
        text += " In parentheses: an earlier commit, same machine."
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
        "In a new process no operator is known, and the optimizer has no state. The first "
        "three steps, over those of a new process in plain PyTorch (`--parts processes`, "
        f"commit `{found[0]['commit'][:9]}`):"
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
    by_key = {(row["case"], row["fraction"], row["threads"]): row for row in found["rows"]}
    numbers = sorted({number for _, _, number in by_key})
    rows = [
        [
            case,
            _budget(fraction),
            *(
                "/".join(cell(by_key[case, fraction, n][key]["median"]) for key in _TIMES)
                for n in numbers
            ),
        ]
        for case, fraction in dict.fromkeys((case, fraction) for case, fraction, _ in by_key)
    ]
    peaks = [row["peak_over_budget"]["max"] for row in found["rows"] if "peak_over_budget" in row]
    text = (
        "Several Python threads share one budget, and each trains its own model. Elapsed and "
        "processor time over those of as many threads in plain PyTorch. The highest peak is "
        f"{max(peaks):.3f} times the budget. *No limit* and *32 times*: see "
        "[recording](#what-recording-adds). On a CPU, autograd runs a backward pass in the "
        "thread that calls it."
    )
    heads = ["model", "activations", *(f"{n} threads" for n in numbers)]
    return section("Several threads", found, text, table_of(heads, rows))


_TIMES = ("elapsed", "processor")


def cap() -> str:
    found = load("cap")
    if not found:
        return ""
    measured = [row for row in found["rows"] if "over" in row]
    models, ways = (list(dict.fromkeys(row[key] for row in measured)) for key in ("model", "way"))
    rows = []
    for model in models:
        of_way = {
            way: [row for row in measured if (row["model"], row["way"]) == (model, way)]
            for way in ways
        }
        peaks = [_most(of_way[way], "first", "over") for way in ways]
        rows.append([model, *peaks, *(_most(of_way[way], "resident") for way in ways[:2])])
    budgets = ", ".join(f"{each:.0%}" for each in sorted({row["fraction"] for row in measured}))
    text = (
        "Is the budget ever exceeded? The table shows the highest peak divided by the budget, of "
        f"the first and of later steps, at {budgets} of the activations, from the allocations and "
        "frees that PyTorch's profiler reports. The last two columns show the growth of the "
        "process's resident memory divided by the budget. Threads and libraries add a constant to "
        "this growth, so it exceeds small budgets."
    )
    names = [way.removeprefix("rekindle ") for way in ways]
    heads = ["model", *names, *(f"resident, {name}" for name in names[:2])]
    return section("A cap that is a cap", found, text, table_of(heads, rows))


def _most(rows: Iterable[dict[str, Any]], *keys: str) -> str:
    """Return the largest figure under `keys`, or "" if none was measured."""
    figures = [row[key] for row in rows for key in keys if key in row]
    return f"{max(figures):.3f}" if figures else ""


def moved() -> str:
    """Return the section on weights, gradients and optimizer state that move to a file."""
    found = load("moved")
    if not found:
        return ""
    rows = [
        [
            f"AdamW, {row['optimizer']}",
            f"{row['share']:.0%}",
            *(f"{row[key] / 2**20:.0f}" for key in ("state", "out", "back")),
            cell(row["least"]),
            cell(row["time"]["median"]),
            cell(row["over"]["median"]),
            "yes" if row["same"] else "no",
        ]
        for row in found["rows"]
        if "over" in row
    ]
    text = (
        "A GPT trains within a budget that is a share of its weights, gradients and optimizer "
        "state (*state*, MiB). *Out* and *back*: MiB copied to the file and back in a step; "
        "*least*: these bytes divided by those that do not fit, each copied once out and back. "
        "On a CPU the program waits for each copy. *Over copies*: the time of a step, divided by "
        "the time of a plain step and of the same bytes written to a file and read back."
    )
    heads = ["optimizer", "budget", "state", "out", "back", "least"]
    heads += ["time over plain", "over copies", "same bits"]
    return section("State that moves to a file", found, text, table_of(heads, rows))


def fragmentation() -> str:
    found = load("fragmentation")
    if not found:
        return ""
    rows, counted = found["rows"], found["summary"]
    by_key = {(row["program"], row["ratio"]): row for row in rows}
    programs, ratios = list(dict.fromkeys(program for program, _ in by_key)), (1.0, 0.7, 0.4)
    reserved = [[name, *(_reserved(by_key[name, at]) for at in ratios)] for name in programs]
    text = (
        "PyTorch's CUDA allocator reserves more than tensors use, because it rounds sizes and "
        "keeps free pieces. Simulated, by models: *native* is the default allocator, "
        "*expandable* has `expandable_segments:True`. *Pages* is only a model: Rekindle has no "
        "such allocator for a device yet. Each value of more than 1 MiB has pages of 2 MiB of "
        "its own, wherever they are, so only rounding costs memory: 4.75 MiB take 6 MiB in the log "
        "of an LSTM. The peak of reserved memory over that of tensors, with "
        "native, expandable and pages, by budget (share of the peak). "
        f"Programs with a peak below {found['gigabytes']:.0f} GB were enlarged to it. x: the "
        "program fails, or recomputes too long."
    )
    count = (
        "What do free pieces cost on a device with 1.05 or 1.2 times the budget? If no piece "
        "is large enough, values are evicted one by one by *score*, or the cheapest at "
        "adjacent addresses (*window*; with pages by score). Of all cases (a program and a "
        "budget), *window* recomputes less (*better*) or more (*worse*), by more than a "
        "thousandth of the computation. *As by sums*: no more than with an allocator that "
        "always succeeds if enough is free in total. *Within 2 %*: the step takes at most 1.02 "
        "times its time with that allocator."
    )
    parts = ["## Memory that an allocator takes in addition", "", said(found), "", text, ""]
    parts += [*table_of(["program", *(f"{at:.0%}" for at in ratios)], reserved), ""]
    heads = ["device", *next(iter(counted.values()))]
    parts += [count, "", *table_of(heads, [[name, *of.values()] for name, of in counted.items()])]
    return "\n".join([*parts, *_models_compared()]) + "\n"


def _reserved(row: dict[str, Any]) -> str:
    models = [row[name] for name in ("native", "expandable", "pages")]
    if any(of["reserved"] is None for of in models):
        return "x"
    return ", ".join(cell(of["reserved"] * (1 + of["rounding"])) for of in models)


def _models_compared() -> list[str]:
    """Return the part on what an H200 reserved, and on how far the models are off."""
    found = load("allocator_models")
    if not found:
        return []
    rows = found["rows"]
    off = max(abs(row["off"]) for row in rows if row["off"] is not None)
    text = (
        "How far are the models off? The table has the MiB that an H200 reserved, and by how "
        f"much the simulation differs: at most {off:.1%}. On a limited device both are bounded "
        "by its memory. The simulation runs one step from an empty allocator; on the device, "
        "several steps ran. The figures are those of run 3 [above](#on-a-gpu), which has most "
        "methods; in run 1 results take over memory, and in the traces not. The traces were made "
        "without a GPU, from fake tensors and estimated times, and are not in the repository. "
        "With a GPU, `rekindle.capture` records such traces. They lack the workspaces of cuBLAS "
        "(68 to 78 MiB), which are added. *Pages* cannot be compared."
    )
    speed = [row for row in rows if "method" in row]
    ways = list(dict.fromkeys((row["method"], row["allocator"]) for row in speed))
    cells = {(row["model"], row["bf16"], row["method"], row["allocator"]): row for row in speed}
    table = [
        [
            f"{model}, {'bf16' if bf16 else 'fp32'}",
            *(_off(cells.get((model, bf16, *way))) for way in ways),
        ]
        for model, bf16 in dict.fromkeys((row["model"], row["bf16"]) for row in speed)
    ]
    heads = [_WAYS[method] + (", expandable" if setting else "") for method, setting in ways]
    checks = [row for row in rows if "budget" in row]
    budgets = list(dict.fromkeys(row["budget"] for row in checks))
    lines = [
        [name, *(_off(row) for row in checks if bool(row["allocator"]) == (name == "expandable"))]
        for name in ("native", "expandable")
    ]
    about = (
        "BERT-base, with attention from single operators, in budgets of these shares of its "
        "activations (the check *memory* of the [self-tests](#self-tests-on-a-gpu)):"
    )
    parts = ["", said(found), "", text, "", *table_of(["model", *heads], table)]
    return [*parts, "", about, "", *table_of(["allocator", *budgets], lines)]


_WAYS = {
    "plain": "plain",
    "plain, beyond the memory": "plain, larger batch",
    "online": "`budget`",
    "online, in that device": "limited device",
}


def _off(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['device']:,}, {'fails' if row['off'] is None else format(row['off'], '+.1%')}"


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
        if row["way"] != "plain"
    ]  # fmt: skip
    text = (
        "A loop of thousands of steps `x = normalize(c @ x)`, and its backward pass. Budgets "
        "are shares of the activations; *checkpoint* is `torch.utils.checkpoint` around each "
        "sqrt(n) steps of n. Processor times."
    )
    heads = ["steps", "method", "peak MiB", "time over plain", "recomputed", "same bits"]
    return section("Long loops", found, text, table_of(heads, rows))
