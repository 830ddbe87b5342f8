"""Write docs/benchmarks.md from the committed results: python benchmarks/page.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _compiled_table import HEADS, depths, table
from _device import checks, newest_share, throughput
from _memory import (
    cap,
    first_minute,
    fragmentation,
    loops,
    moved,
    native,
    threads,
)
from _tables import (
    by_machine,
    cell,
    load,
    percent,
    said,
    several_runs,
    table_of,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

<!-- `python benchmarks/page.py` writes this page from benchmarks/results/; a test compares both -->

![Time of a step against activation memory: a small GPT, several tools](images/peers_gpt.png)

Each point is one setting of one tool, for training steps of a small GPT on two CPU cores. Further
left is less memory, further down is less time. The star is plain PyTorch (without Rekindle); solid
lines are Rekindle's methods.

## What is claimed

CLAIMS

Each section has one claim. It begins with the command that measured its figures, the machine, the
version of PyTorch and the commit. Both times of a ratio are measured in one run on one machine.
Rows of one table may come from several runs; the section then lists their commits.
`benchmarks/results/` has all figures, also those left out here; `benchmarks/README.md` says how
each script measures. Terms:

- *Online*: `rekindle.budget` before it has learned a plan. *Learned*: it follows a learned plan.
- *Planned*: `rekindle.plan`. *Compiled*: with `compile=True`. *Sequential*: `rekindle.sequential`.
- *Activations*: the memory peak of a plain step, minus parameters, gradients, optimizer state and
  batches. A budget of 50 % allows half of the activations, in addition to these other tensors.
- *Time over plain*: the median time of a step, divided by its time in plain PyTorch.
- *Same bits*: gradients and other results equal those of plain PyTorch, bit for bit.
"""


def page() -> str:
    """Return the whole page: claims first, one section for each, self-tests at the end."""
    sections = (
        peers, throughput, cap, moved, zoo, sweeps, largest_batch, runtime, native, first_minute,
        threads, loops, learned, policies, compiled, planners, fragmentation, archived, checks,
    )  # fmt: skip
    head = HEAD.replace("CLAIMS", "\n".join(claims()))
    return "\n".join([head, *(text for section in sections if (text := section()))])


def claims() -> list[str]:
    """Return the table of claims, with figures from the results."""
    best = {
        (row["model"], row["method"]): row["time"]["median"]
        for row in reversed(load("peers")["rows"])
        if row.get("memory", 1) <= 0.51
    }
    tools = ("rekindle planned", "rekindle learned", "checkpoint")
    half = ["/".join(cell(best[model, tool]) for tool in tools) for model in ("gpt", "bert")]
    limited, roomy = (
        newest_share("BERT-large", way) for way in ("online, in that device", "online")
    )
    over = [max(row["first"], row["over"]) for row in load("cap")["rows"] if "over" in row]
    zoo, tested = load("zoo")["counts"], load("sweeps")
    same = sum(row["same"] for row in tested.values())
    tried = sum(row["tried"] for row in tested.values())
    unknown = sum(row["different"] for row in tested.values())
    floor = [row["real_over_bound"] for row in load("floors")["rows"] if "bound" in row]
    rows = [
        [
            "half of the activations cost little time: planned/learned/`torch.utils.checkpoint`",
            f"small GPT {half[0]}, BERT {half[1]}",
            "[tools](#compared-with-other-tools)",
        ],
        [
            "on a GPU BERT-large (float32) trains twice the batch in the same memory",
            (
                f"{limited} of plain throughput in the same device memory; {roomy} within the same "
                "peak of tensors, where the allocator reserves 22% more"
            ),
            "[GPU](#on-a-gpu)",
        ],
        [
            "the budget is a cap",
            (
                f"on a CPU the peak is at most {max(over):.3f} times the budget; GPU: "
                "[self-tests](#self-tests-on-a-gpu)"
            ),
            "[cap](#a-cap-that-is-a-cap)",
        ],
        [
            "results have the same bits",
            f"{zoo['equal']} of {zoo['tried']} architectures",
            "[architectures](#architectures)",
        ],
        [
            "also operators, modules, optimizers, random programs",
            f"{same:,} of {tried:,} samples; {unknown} differ without a known reason",
            "[samples](#operators-modules-optimizers-random-programs)",
        ],
        [
            "small budgets suffice",
            f"{min(floor):.2f} to {max(floor):.2f} times the least memory of any schedule",
            "[archived](#questions-that-are-answered)",
        ],
    ]
    return table_of(["claim", "figure", "section"], rows)


def peers() -> str:
    """Return the section on other tools.

    For each tool and each of several memory limits, it has the time of the fastest setting of the
    tool that needs no more memory than the limit.
    """
    found = load("peers")
    if not found:
        return ""
    rows = [row for row in found["rows"] if "time" in row]
    limits = (0.51, 0.26, 0.15)  # a little above the budgets, because allocations are rounded
    parts = ["## Compared with other tools", "", said(found), ""]
    parts += [
        "Three tables show the time over plain of each tool's fastest setting within 51, 26 and",
        "15 % of plain PyTorch's activations. The last table shows the least memory of settings",
        "that were tried; no budget below 12 % was tried for *gpt*, *bert* and *resnet50*, and",
        "none below 25 % for the others (*Compiled plans* has plans within 15 %). An",
        "empty cell: no setting needs so little. PyTorch's profiler measures memory. Plain PyTorch",
        "is not compiled, so a compiled plan can be faster. *Checkpoint* is",
        "`torch.utils.checkpoint` around blocks, *selective* its variant that keeps the results of",
        "products.",
        *several_runs(found["rows"]),
    ]
    for cpu, measured in by_machine(rows).items():
        models = list(dict.fromkeys(row["model"] for row in measured))
        for limit in limits:
            table = by_method(measured, models, lambda mine, limit=limit: fastest(mine, limit))
            parts += ["", *table_of([f"within {limit:.0%}, {cpu}", *models], table)]
        table = by_method(measured, models, least)
        parts += ["", *table_of([f"least memory, {cpu}", *models], table)]
    reasons = [
        f"{method} at {model}: `{reason}`"
        for model in dict.fromkeys(row["model"] for row in found["rows"])
        for method, reason in failures(found["rows"], model).items()
    ]
    parts += ["", f"What failed: {'; '.join(reasons)}.", ""]
    for model in dict.fromkeys(row["model"] for row in rows):
        if (picture := PAGE.parent / "images" / f"peers_{model}.png").exists():
            parts.append(f"![{model}](images/{picture.name}){{ width=340 }}")
    return "\n".join(parts) + "\n"


def by_method(
    rows: list[dict[str, Any]],
    models: list[str],
    figure: Callable[[list[dict[str, Any]]], str],
) -> list[list[str]]:
    """Return a row for each method with a figure for each model, without empty rows."""
    methods = dict.fromkeys(row["method"] for row in rows)
    table = [
        [
            method,
            *(
                figure([row for row in rows if (row["model"], row["method"]) == (model, method)])
                for model in models
            ),
        ]
        for method in methods
    ]
    return [row for row in table if any(row[1:])]


def fastest(rows: list[dict[str, Any]], limit: float) -> str:
    times = [row["time"]["median"] for row in rows if row["memory"] <= limit]
    return cell(min(times)) if times else ""


def least(rows: list[dict[str, Any]]) -> str:
    return f"{min(row['memory'] for row in rows):.0%}" if rows else ""


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
    parts += [
        "*Planned* runs eagerly; in a *compiled plan* Inductor compiles small groups of cheap",
        "operators; *torch.compile* is the whole model, without a budget. *Seconds* is the time",
        "until the first step ends, compilation included. Each compiled plan gives the same bits",
        "as the same compiled code without a budget. The rows *rekindle compiled* above were",
        "measured with an earlier version.",
        "",
    ]
    return "\n".join([*parts, *table_of(HEADS, table(found["rows"]))]) + "\n"


def largest_batch() -> str:
    """Return the section on the largest batches within the memory of a smaller, plain batch."""
    found = load("largest_batch")
    if not found:
        return ""
    parts = ["## The largest batch in the memory of the plain run", "", said(found), ""]
    parts += [
        "The table shows samples per second with one, two and three times the base batch, and with",
        "the largest batch that fits into the memory of plain PyTorch with the base batch, each",
        "divided by those of plain PyTorch with the base batch (median). In rows *plain*, larger",
        "batches use more memory; *1x* is measured twice, so it is not exactly 1.",
        f"Each plan was searched for {found['seconds_for_a_plan']:.0f} seconds.",
        "[Published for DTR on GPUs](https://marisa.moe/dtr.html): 94.3 and 96.5 % with twice the",
        "batch (BERT-base, BERT-large), 93.2 % with three times the batch (GPT-2).",
    ]
    parts += several_runs(found["rows"])
    for cpu, measured in by_machine(found["rows"]).items():
        methods: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        for row in measured:
            methods.setdefault((row["model"], row["method"]), {})[row["at"]] = row
        table = [
            [f"{model}, {way}", *(rate(at.get(each)) for each in ("1x", "2x", "3x")), most(at)]
            for (model, way), at in methods.items()
        ]
        parts += ["", *table_of([cpu, "1x", "2x", "3x", "largest"], table)]
    if (picture := PAGE.parent / "images" / "largest_batch.png").exists():
        parts += ["", f"![Throughput over the batch](images/{picture.name})"]
    return "\n".join(parts) + "\n"


def rate(row: dict[str, Any] | None) -> str:
    return cell(row["throughput"]["median"]) if row and "throughput" in row else ""


def most(at: dict[str, dict[str, Any]]) -> str:
    """Return the largest batch as a multiple of the base batch, and its throughput."""
    row = at.get("largest", {})
    return f"{row['multiple']:g}x: {rate(row)}" if "throughput" in row else ""


def failures(rows: Iterable[dict[str, Any]], model: str) -> dict[str, str]:
    """Return the reasons why methods failed at a model; with the settings if others worked."""
    here = [row for row in rows if row["model"] == model]
    works = {row["method"] for row in here if "time" in row}
    found: dict[str, str] = {}
    for row in here:
        if "failed" in row:
            method, setting = row["method"], row["setting"]
            found.setdefault(f"{method} {setting}" if method in works else method, row["failed"])
    return found


def runtime() -> str:
    found = load("runtime")
    if not found:
        return ""
    parts = ["## The smallest budgets", "", said(found), ""]
    rows = [
        [name, f"{row['fraction']:.0%}", f"{row['program_holds']:.0%}"]
        for name, row in found["smallest"].items()
    ]
    parts += [
        "The smallest budget with which a model trains. *Held*: what variables hold and operators",
        "need at once, the peak of a forward pass for which autograd saves nothing. It can be",
        "above the smallest budget, because there are no gradients in such a pass. These models",
        "are smaller than those of the other tables.",
    ]
    heads = ["share of the activations", "smallest budget", "held"]
    return "\n".join([*parts, "", *table_of(heads, rows)]) + "\n"


def policies() -> str:
    found = load("policies")
    if not found:
        return ""
    parts = ["## Policies", "", said(found), ""]
    parts += [
        "Which policy recomputes least? Simulated on recorded steps; a *case* is a program and a",
        "budget, at 50, 30 and 15 % between the smallest budget with a schedule and",
        "the peak when everything is kept. *Over h_DTR*: recomputation divided by that of the DTR",
        "paper's policy (geometric mean); *less* and *more* count cases. *Within 1.5*: cases of",
        "at most 1.5 times a proven bound. *No room*: the program ran out of its budget. The",
        "default, *thrifty*, was tuned on the programs *chosen on* and no others.",
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
    text = (
        "A learned plan recomputes less. Recomputation time divided by computation time, within a "
        "share of the activations; no schedule recomputes less than the lower bound."
    )
    heads = ["model", "activations", "online", "learned", "lower bound"]
    parts = ["## Learned schedules", "", said(found), "", text, "", *table_of(heads, rows), ""]
    return "\n".join([*parts, *turns()])


def turns() -> list[str]:
    """Return the lines about the time of steps with learned plans and without."""
    found = load("turns")
    if not found:
        return []
    rows = [
        [
            row["model"],
            f"{row['share']:.0%}",
            f"{row['online']['median']:.2f}",
            f"{row['learned']['median']:.2f}",
            f"{row['learned/online']:.2f}",
            percent(row["followed"]),
        ]
        for row in found["rows"]
        if "online" in row
    ]
    text = (
        "A learned plan is followed only while its steps take at most 2 % longer. Processor time "
        "of a step over plain, online and with learned plans, which take turns in one process, "
        "within a share of the activations. The third column is the median of the ratios of "
        "neighboring blocks, so it is not the quotient of the other two. The last one is the share "
        "of steps that followed a plan."
    )
    heads = ["model", "activations", "online", "learned", "learned / online", "followed"]
    return [said(found), "", text, "", *table_of(heads, rows), ""]


def planners() -> str:
    found = load("planners")
    if not found:
        return ""
    rows = []
    by_problem: dict[tuple[str, float], dict[str, Any]] = {}
    for row in found["rows"]:
        by_problem.setdefault((row["graph"], row["ratio"]), {})[row["planner"]] = row
    for (graph, ratio), plans in by_problem.items():
        shown = (0.6,) if graph.startswith(("vgg16", "gpt1l")) else (0.5, 0.3)
        if graph.startswith("chain") or "cuts" not in plans or ratio not in shown:
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
    heads = ["graph", "budget", "Cuts", "lower bound", "seconds", "Rotor", "Chen", "DTR"]
    about = found["about"]
    command = f"`{about['command']}`, {about['cpu']}, {about['cores']} cores."
    text = (
        "Recomputation of each planner's plan over computation, at budgets of 50 and 30 % of the "
        "peak (*vgg16* and *gpt1l*: 60 %). *Cuts* is the default planner, with its search time; it "
        "also proves the *lower bound*. *DTR* is a simulated online run with the paper's policy. "
        "An empty cell: no plan was found, or the planner was not tried."
    )
    parts = ["## Planners", "", command, "", text, ""]
    return "\n".join([*parts, *table_of(heads, rows)]) + "\n"


def zoo() -> str:
    found = load("zoo")
    if not found:
        return ""
    counts = found["counts"]
    parts = ["## Architectures", "", said(found), ""]
    parts += [
        f"One step of each of {counts['tried']} architectures of transformers and diffusers, with",
        "small random weights, within 30 % of the activations or the smallest budget that works:",
        f"{counts['equal']} give plain PyTorch's bits. {', '.join(counts['unstable'])} cannot be",
        "compared: two runs in plain PyTorch already differ.",
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
    parts = ["", "### The same architectures with `rekindle.plan`", "", said(found), ""]
    parts += [
        f"Of {counts['tried']} architectures, `rekindle.plan` gave the same bits for",
        f"{counts['roomy']} with a large budget, and named a reason why it cannot plan",
        f"{counts['refused']}. {exact} were traced while `torch.compiler.is_compiling()` was",
        "false, as in plain PyTorch; the others can only be traced while it is true. Within 40 %",
        "of the activations, or the smallest budget with a plan,",
        f"{counts['40%']} of {len(tried)} gave the same bits. Other bits or an unexpected error:",
        f"{', '.join(counts['failed']) or 'none'}.",
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
    heads = ["command", "tried", "same bits", "excepted", "different"]
    text = (
        "PyTorch's own test samples of operators (opinfo), modules and optimizers, with everything "
        "evicted after every operator; random programs (fuzz) within a small budget. *Excepted*: "
        "known differences with a reason in PyTorch itself. *Different*: all others."
    )
    parts = ["## Operators, modules, optimizers, random programs", "", text, ""]
    return "\n".join([*parts, *table_of(heads, rows)]) + "\n"


def archived() -> str:
    """Return the section that lists the measurements whose programs left the repository."""
    about, *sections = (ROOT / "benchmarks/archived.md").read_text(encoding="utf-8").split("\n### ")
    titles = "".join(f"- {section.partition(chr(10))[0]}\n" for section in sections)
    return f"{about.rstrip()}\n\n{titles}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
