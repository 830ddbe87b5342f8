"""Write docs/benchmarks.md from the committed results: python benchmarks/page.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _compiled_table import HEADS, depths, table
from _memory import (
    breakdown,
    cap,
    first_minute,
    floors,
    fragmentation,
    functions,
    in_place,
    loops,
    native,
    restarts,
    threads,
)
from _tables import (
    cell,
    load,
    outcome,
    percent,
    said,
    several_runs,
    share,
    spread,
    table_of,
)

ROOT = Path(__file__).parents[1]
WAYS = ("recompute", "swap", "hybrid")
PAGE = ROOT / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

<!-- Written by `python benchmarks/page.py` from benchmarks/results/; a test sees to that. -->

![Time of a step against activation memory: a small GPT, several tools](images/peers_gpt.png)

A small GPT on two CPU cores: each point is a setting of a tool. Further left takes less memory,
further down takes less time; the star is plain PyTorch. Solid lines are Rekindle's methods,
dashed lines other tools ([more models](#beside-other-tools)).

A file holds every figure on this page, with the command that measured it, the machine, the
versions and the commit. Both sides of a ratio are measured in one run. `benchmarks/README.md` in
the repository says what each claim is and how it is measured.
"""


def page() -> str:
    """Return the whole page."""
    sections = (
        on_device, peers, compiled, largest_batch, runtime, native, first_minute, breakdown,
        threads, cap, floors, functions, in_place, loops, restarts, fragmentation, policies,
        learned, prediction, accuracy, anything, swap, mixtures, planners, scale, zoo, sweeps,
    )  # fmt: skip
    return "\n".join([HEAD, *(text for section in sections if (text := section()))])


def on_device() -> str:
    """Return the section on GPUs, the newest run first."""
    found = load("on_device")
    return "\n".join(["## On a GPU", "", *map(_on_device, found["runs"])]) if found else ""


def _on_device(found: dict[str, Any]) -> str:
    """Return checks that hold, the host's time, and throughput in a smaller batch's memory."""
    version, commit = found["versions"]["torch"], found["commit"][:9]
    said = f"`{found['command']}`, {found['device']}, torch {version}, commit `{commit}`."
    parts = [said, "", found["remarks"], ""]
    checks = [
        [f"{each['stage']} {each['setting']}", *_held(each["lines"]), each["ended"] or "done"]
        for each in found["stages"]
        if not each["stage"].startswith("speed")
        and (each["ended"] or any("check" in line for line in each["lines"]))
    ]
    parts += table_of(["checks", "hold", "of", ""], checks)
    parts += [
        "",
        "Rows a second in the memory that plain PyTorch takes for the smaller batch, and over it",
        "with that batch (published for DTR: 94.3 %, 96.5 %, 93.2 %). *Watched* is a budget",
        "without a limit. *In that device*: the device has no more memory than the plain run of",
        "the smaller batch reserved.",
    ]
    lines = [line for each in found["stages"] for line in each["lines"]]
    hosts = [
        [line["host of"], line["calls"], line["plain ms"], line["watched ms"],
         line["within half ms"], line["within half, recomputed"]]
        for line in lines if "host of" in line
    ]  # fmt: skip
    heads = ["a small batch in bfloat16", "calls", "plain ms", "watched ms", "within half ms",
             "recomputed operators"]  # fmt: skip
    parts += ["", *table_of(heads, hosts)] if hosts else []
    optimizers = {line["optimizer"]: line["ms a step"] for line in lines if "optimizer" in line}
    if optimizers:
        parts += ["", "A step of fused AdamW over 300 small parameters, ms: "
                  + ", ".join(f"{name} {ms}" for name, ms in optimizers.items()) + "."]  # fmt: skip
    for bf16 in (False, True):
        rows = [line for line in lines if "rows/s" in line and line["bf16"] is bf16]
        base = {row["model"]: row["rows/s"] for row in rows if row["method"] == "plain"}
        table = [
            [f"{row['model']}, {row['method']}{_allocator(row)}", row["rows"], row["rows/s"],
             _over(row, base), row["peak MiB"], row["reserved MiB"],
             row["recomputed"], f"{row['host share']:.0%}"]
            for row in rows
        ]  # fmt: skip
        heads = ["bfloat16" if bf16 else "float32", "rows", "rows/s", "over plain", "peak MiB",
                 "reserved MiB", "recomputed operators", "time until the host is done"]  # fmt: skip
        parts += ["", *table_of(heads, table)]
    return "\n".join(parts) + "\n"


def _over(row: dict[str, Any], base: dict[str, float]) -> str:
    """Return throughput over that of the plain run, if there is one."""
    plain = base.get(row["model"])
    return f"{row['rows/s'] / plain:.1%}" if plain else ""


def _allocator(row: dict[str, Any]) -> str:
    return f" ({row['allocator']})" if row["allocator"] else ""


def _held(lines: Iterable[dict[str, Any]]) -> tuple[int, int]:
    checks = [line["ok"] for line in lines if "check" in line]
    return sum(checks), len(checks)


def peers() -> str:
    """Return the section on other tools: the fastest point of each within a memory."""
    found = load("peers")
    if not found:
        return ""
    rows = [row for row in found["rows"] if "time" in row]
    limits = (0.75, 0.51, 0.26, 0.16)  # the budgets, plus the rounding of allocations
    methods = list(dict.fromkeys(row["method"] for row in rows))
    parts = ["## Beside other tools", "", said(found), ""]
    parts += [
        "Time of a step over plain PyTorch, at the fastest setting that stays within that share of",
        "the activation memory (measured by allocator events, for all alike).",
    ]
    parts += several_runs(found["rows"])
    for model in dict.fromkeys(row["model"] for row in rows):
        table = []
        for method in methods:
            mine = [row for row in rows if (row["model"], row["method"]) == (model, method)]
            if not mine:
                continue
            best = [
                min((r["time"]["median"] for r in mine if r["memory"] <= limit), default=None)
                for limit in limits
            ]
            least = min(row["memory"] for row in mine)
            table.append([method, *(cell(each) for each in best), f"{least:.0%}"])
        heads = ["", *(f"within {limit:.0%}" for limit in limits), "least memory"]
        parts += ["", f"### {model}", "", *table_of(heads, table)]
        for method, reason in failures(found["rows"], model).items():
            parts += ["", f"{method} fails: `{reason}`"]
        if (picture := PAGE.parent / "images" / f"peers_{model}.png").exists():
            parts += ["", f"![Time against memory, {model}](images/{picture.name})"]
    return "\n".join(parts) + "\n"


def compiled() -> str:
    if not (found := load("compiled")):
        return ""
    parts = [
        "## Compiled plans",
        "",
        said(found),
        *several_runs(found["rows"]),
        depths(found["rows"]),
    ]
    parts += ["What is called rekindle compiled above is from before there were segments.", ""]
    return "\n".join([*parts, *table_of(HEADS, table(found["rows"]))]) + "\n"


def largest_batch() -> str:
    """Return the section on largest batches in the memory of the plain run."""
    found = load("largest_batch")
    if not found:
        return ""
    parts = ["## The largest batch in the memory of the plain run", "", said(found), ""]
    parts += [
        "Samples a second over plain PyTorch at the base batch, its largest within that memory:",
        "median (least-most). Plain beyond 1x takes more memory: what larger batches alone bring.",
        f"Plans got {found['seconds_for_a_plan']:.0f} seconds each. Published for DTR on GPUs",
        "([source](https://marisa.moe/dtr.html)): 2x at 94.3 % (BERT-base) and 96.5 %",
        "(BERT-large), 3x at 93.2 % (GPT-2).",
    ]
    parts += several_runs(found["rows"])
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        methods: dict[str, dict[str, dict[str, Any]]] = {}
        for row in found["rows"]:
            if row["model"] == model:
                methods.setdefault(row["method"], {})[row["at"]] = row
        table = [
            [method, *(throughput(at.get(each)) for each in ("1x", "2x", "3x")), most(at)]
            for method, at in methods.items()
        ]
        heads = [model, "1x", "2x", "3x", "largest: throughput"]
        parts += ["", *table_of(heads, table)]
        for method, reason in failures(found["rows"], model).items():
            parts += ["", f"{method} fails: `{reason}`"]
    if (picture := PAGE.parent / "images" / "largest_batch.png").exists():
        parts += ["", f"![Throughput over the batch](images/{picture.name})"]
    return "\n".join(parts) + "\n"


def throughput(row: dict[str, Any] | None) -> str:
    return spread(row["throughput"]) if row and "throughput" in row else ""


def most(at: dict[str, dict[str, Any]]) -> str:
    """Return the largest batch as a multiple of the base batch, and its throughput."""
    row = at.get("largest", {})
    return f"{row['multiple']:g}x: {throughput(row)}" if "throughput" in row else ""


def failures(rows: Iterable[dict[str, Any]], model: str) -> dict[str, str]:
    """Return the reasons why methods failed at a model."""
    return {
        row["method"]: row["failed"] for row in rows if row["model"] == model and "failed" in row
    }


def runtime() -> str:
    found = load("runtime")
    if not found:
        return ""
    parts = ["## What the online runtime costs", "", said(found), ""]
    rows = [
        [name, row["operators"], f"{row['added_us_per_operator']:.1f}", spread(row["ratio"])]
        for name, row in found["overhead"].items()
    ]
    heads = ["nothing let go", "operators", "us added to each", "time over plain"]
    parts += table_of(heads, rows)
    rows = [
        [name, *(spread(row[share]["ratio"]) for share in ("1/2", "1/3"))]
        for name, row in found["step_time"].items()
    ]
    parts += ["", *table_of(["time over plain", "half the activations", "a third"], rows)]
    rows = [
        [name, f"{row['fraction']:.0%}", f"{row['program_holds']:.0%}"]
        for name, row in found["smallest"].items()
    ]
    heads = ["share of the activations", "smallest feasible", "held by the program"]
    return "\n".join([*parts, "", *table_of(heads, rows)]) + "\n"


def policies() -> str:
    found = load("policies")
    if not found:
        return ""
    parts = ["## Policies", "", said(found), ""]
    parts += [
        "What is recomputed online, in simulation, over what h_DTR recomputes (geometric mean), in",
        "single steps within half, 0.3 and 0.15 of the range from the least that any schedule",
        "needs to keeping everything; and how many are within 1.5 times the proven lower bound.",
    ]
    rows = [
        [
            f"{group}: {name}",
            f"{row['over h_DTR']:.2f}",
            *(row[key] for key in ("less", "more", "cases")),
            f"{row['within 1.5 of the bound']} of {row['with a bound']}",
            row["no room"],
        ]
        for group, summary in found["summary"].items()
        for name, row in summary.items()
    ]
    heads = ["programs: policy", "over h_DTR", "less", "more", "cases", "within 1.5", "no room"]
    return "\n".join([*parts, "", *table_of(heads, rows)]) + "\n"


def learned() -> str:
    found = load("learned")
    if not found:
        return ""
    rows = [
        [
            row["model"],
            row["fraction"],
            *(percent(row.get(key)) for key in ("online", "learned", "bound")),
        ]
        for row in found["rows"]
    ]
    heads = ["recomputation over computation", "activations", "online", "learned", "lower bound"]
    return "\n".join(["## Learned schedules", "", said(found), "", *table_of(heads, rows)]) + "\n"


def prediction() -> str:
    found = load("prediction")
    if not found:
        return ""
    rows = [
        [share, f"{row['predicted']:.2f}", spread(row["measured"]), f"{row['error']:+.0%}"]
        for share, row in found.items()
        if share.endswith("%")
    ]
    heads = ["activations", "predicted time over plain", "measured", "error"]
    title = "## What `rekindle.profile` foretells"
    return "\n".join([title, "", said(found), "", *table_of(heads, rows)]) + "\n"


def accuracy() -> str:
    found = load("plan_accuracy")
    if not found:
        return ""
    rows = [
        [
            row["model"],
            row["budget"],
            percent(row["overhead"]),
            f"{row['peak_error']:+.1%}",
            f"{row['time_error']:+.1%}",
        ]
        for row in found["rows"]
    ]
    heads = ["planned model", "budget", "recomputation", "error of the peak", "error of the time"]
    title = "## Planned models: predicted against measured"
    return "\n".join([title, "", said(found), "", *table_of(heads, rows)]) + "\n"


def anything() -> str:
    found = load("anything")
    if not found:
        return ""
    fractions: dict[str, dict[str, dict[str, Any]]] = {"pipeline without autograd": {}}
    fractions["pipeline without autograd"] = found["pipeline"]
    for row in found["rows"]:
        fractions.setdefault(row["model"], {})[row["evict"]] = row
    rows = [
        [name, *(share(ways.get(way)) for way in ("saved", "anything"))]
        for name, ways in fractions.items()
    ]
    heads = ["smallest feasible share of the activations (recomputation)", "default", "anything"]
    title = '## `evict="anything"`'
    return "\n".join([title, "", said(found), "", *table_of(heads, rows)]) + "\n"


def swap() -> str:
    found = load("swap_simulated")
    if not found:
        return ""
    parts = ["## Swap or recompute, simulated", "", said(found), ""]
    parts += [
        "Recomputing and waiting over computing, on the DTR paper's logs at 0.4 of what keeping",
        "everything takes; bandwidth as a share of the one that hides everything. The online",
        "choice (hybrid) is greedy: with slow links and small budgets it can lose.",
    ]
    rows = [
        [row["log"], f"{row['share']:.0%}", *(outcome(row[way]) for way in WAYS)]
        for row in found["figures"]["rows"]
        if row["ratio"] == 0.4 and row["share"] in (0.05, 0.2, 0.5)
    ]
    counts = found["figures"]["summary"]
    parts += [
        f"Of {counts['cases']} cases it is better than both alone in {counts['hybrid better']},",
        f"as good as the better one in {counts['equal']}, worse in {counts['hybrid worse']}.",
    ]
    heads = ["log", "bandwidth", *WAYS]
    return "\n".join([*parts, "", *table_of(heads, rows)]) + "\n"


def mixtures() -> str:
    found = load("swap_planned")
    if not found:
        return ""
    counts = found["figures"]["summary"]
    parts = ["## Swap and recompute, planned", "", said(found), ""]
    parts += [
        f"Overheads as above, beside a plan that got {found['seconds']:.0f} seconds, and the bound",
        f"that no run can be below. Of {counts['cases']} cases the plan is better than both alone",
        f"in {counts['planned better than both alone']}, worse in {counts['worse']}; beside the",
        f"online choice better in {counts['better than the online choice']},",
        f"worse in {counts['worse than the online choice']}.",
        *several_runs(found["figures"]["rows"]),
    ]
    rows = [
        [
            row["log"],
            f"{row['ratio']:.0%}",
            f"{row['share']:.0%}",
            *(outcome(row[way]) for way in (*WAYS, "planned")),
            percent(row["planned"]["bound"]),
        ]
        for row in found["figures"]["rows"]
    ]
    heads = ["log", "budget", "bandwidth", *WAYS, "planned", "lower bound"]
    return "\n".join([*parts, "", *table_of(heads, rows)]) + "\n"


def planners() -> str:
    found = load("planners")
    if not found:
        return ""
    rows = []
    by_problem: dict[tuple[str, float], dict[str, Any]] = {}
    for row in found["rows"]:
        by_problem.setdefault((row["graph"], row["ratio"]), {})[row["planner"]] = row
    for (graph, ratio), plans in by_problem.items():
        if graph.startswith("chain") or "cuts" not in plans:
            continue
        best = plans["cuts"]
        others = (plans.get(name, {}).get("overhead") for name in ("rotor", "chen-sqrt-all", "dtr"))
        rows.append(
            [
                graph,
                ratio,
                percent(best["overhead"]),
                percent(best["lower_bound"]),
                f"{best['seconds']:.1f}",
                *(percent(each) for each in others),
            ]
        )
    heads = ["graph", "budget", "cut relaxation", "lower bound", "seconds", "Rotor", "Chen", "DTR"]
    about = found["about"]
    command = f"`{about['command']}`, {about['cpu']}, {about['cores']} cores."
    return "\n".join(["## Planners", "", command, "", *table_of(heads, rows)]) + "\n"


def scale() -> str:
    """Return the section on the cost of an eviction by number of resident values."""
    found = load("simulator_scale")
    if not found:
        return ""
    rows = [
        [f"{row['resident_values']:,}", row["evictions"], row["microseconds_per_eviction"]]
        for row in found["rows"]
    ]
    heads = ["resident values", "evictions", "us for each"]
    parts = ["## Cost of an eviction", "", said(found), "", *table_of(heads, rows)]
    if (picture := PAGE.parent / "images" / "simulator_scale.png").exists():
        parts += ["", f"![Cost of an eviction over the resident values](images/{picture.name})"]
    return "\n".join(parts) + "\n"


def zoo() -> str:
    found = load("zoo")
    if not found:
        return ""
    counts = found["counts"]
    parts = ["## Architectures", "", said(found), ""]
    parts += [
        f"{counts['equal']} of {counts['tried']} architectures of transformers and diffusers train",
        "to the same bits as plain PyTorch at 30 % of their activations or the smallest feasible",
        "share of them.",
        f"Not equal to themselves in plain PyTorch: {', '.join(counts['unstable'])}.",
    ]
    return "\n".join([*parts, *zoo_planned()]) + "\n"


def zoo_planned() -> list[str]:
    found = load("zoo_planned")
    if not found:
        return []
    counts, rows = found["counts"], found["rows"]
    small = [row["40%"] for row in rows if "40%" in row]
    tried = [row for row in small if row["verdict"] != "refused"]
    exact = sum(row["path"] == "eager" for row in (each["roomy"] for each in rows))
    parts = ["", "### By plans", "", said(found), ""]
    parts += [
        f"Planned by `rekindle.plan`, of {counts['tried']} tried: {counts['roomy']} the same bits",
        f"at a roomy budget ({exact} by the path of eager PyTorch, the others by that for",
        f"compilers), {counts['refused']} refused when planned, with the reason.",
        "At 40 % of the activations, or the smallest budget known to do:",
        f"{counts['40%']} the same of {len(tried)} tried.",
        f"Neither the same nor refused: {', '.join(counts['failed']) or 'none'}.",
        *several_runs(rows),
    ]
    return parts


def sweeps() -> str:
    found = load("sweeps")
    if not found:
        return ""
    rows = [
        [
            f"{name}: `{row['command']}`",
            row["tried"],
            row["same"],
            sum(row["excepted"].values()),
            row["different"],
        ]
        for name, row in found.items()
    ]
    heads = ["", "tried", "same bits", "excepted", "different"]
    return (
        "\n".join(
            ["## Operators, modules, optimizers, random programs", "", *table_of(heads, rows)]
        )
        + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
