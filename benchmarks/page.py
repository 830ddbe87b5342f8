"""Write docs/benchmarks.md from the committed results: python benchmarks/page.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _compiled_table import HEADS, depths, table
from _memory import (
    cap,
    first_minute,
    fragmentation,
    loops,
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
    spread,
    table_of,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

<!-- `python benchmarks/page.py` writes this page from benchmarks/results/; a test compares both -->

![Time of a step against activation memory: a small GPT, several tools](images/peers_gpt.png)

The chart shows training steps of a small GPT on two CPU cores. Each point is one setting of one
tool. Points further left need less memory, and points further down take less time. The star is
plain PyTorch, that is, PyTorch without Rekindle. Solid lines are Rekindle's methods, dashed lines
are other tools ([more models](#compared-with-other-tools)).

Each section begins with the command that measured its figures, the machine, the version of
PyTorch and the commit of Rekindle. The files in `benchmarks/results/` contain all figures. Both
times of a ratio are measured in one run on one machine. The rows of one table come from one
machine; the lines of a chart may come from several.
`benchmarks/README.md` in the repository says what each script claims and how it measures.

These terms occur in all sections:

- *Online* is `rekindle.budget` before it has learned a plan.
- *Learned* is `rekindle.budget` when it follows a plan that it made from earlier steps.
- *Planned* is `rekindle.plan`, and *compiled* is `rekindle.plan(..., compile=True)`.
- *Sequential* is `rekindle.sequential`.
- *Activations* is the memory peak of a step in plain PyTorch, minus the parameters, gradients,
  optimizer state and batches. A budget of 50 % (in a column *budget* or *activations*) allows
  half of the activations, in addition to these other tensors.
- *Time over plain* is the time of a training step divided by its time in plain PyTorch: the
  median of several measurements, in some tables with the minimum and the maximum.
- *Recomputed operators* is how many operators ran again in one step.
- *Same bits* says if gradients and other results equal those of plain PyTorch, bit for bit.
"""


def page() -> str:
    """Return the whole page."""
    sections = (
        on_device, peers, compiled, largest_batch, runtime, native, first_minute, threads, cap,
        loops, fragmentation, policies, learned, planners, scale, zoo, sweeps, archived,
    )  # fmt: skip
    return "\n".join([HEAD, *(text for section in sections if (text := section()))])


def on_device() -> str:
    """Return the section on GPUs, the newest run first."""
    found = load("on_device")
    parts = ["## On a GPU", "", *_ABOUT_DEVICE, ""]
    return "\n".join([*parts, *map(_on_device, found["runs"])]) if found else ""


_ABOUT_DEVICE = [
    "`scripts/on_device` checks and measures Rekindle on a GPU. This section has one part for each",
    "run of the script, the newest first. In each part, the first table shows for each group of",
    "checks how many checks there are, how many of them hold, and whether the group ran to its",
    "end. The second table has the time of a step with so small a batch that the GPU waits for the",
    "CPU. The other tables show throughput.",
    "",
    "The question of the throughput tables: how fast does a larger batch train within the memory",
    "that plain PyTorch needs for a smaller batch? For each model, the row *plain* is this run of",
    "plain PyTorch with the smaller batch, here called the *base run*. The rows are:",
    "",
    "- *online*, *learned*: a budget equal to the base run's memory peak. *swap*: the same budget,",
    "  and evicted values may be copied to the host and back instead of recomputed.",
    "- *online, in that device*: the same budget, on a GPU whose usable memory is limited to what",
    "  PyTorch's allocator reserved in the base run.",
    '- *of reserved*: a budget with `of="reserved"`, which limits the memory that the allocator',
    "  reserves, instead of the memory of tensors. The limit is what the base run reserved.",
    "- *watched*: `rekindle.budget(None)`, a budget without a limit, with the smaller batch.",
    "  Rekindle then records all operators, but evicts nothing.",
    "- *plain, beyond the memory*: plain PyTorch with the larger batch, which may use the whole",
    "  memory of the GPU.",
    "",
    "The columns: *rows* is the batch size, *rows/s* the number of samples per second, and *over",
    "plain* the throughput divided by that of the base run. *Peak MiB* is the memory peak of the",
    "tensors, and *reserved MiB* the most memory that PyTorch's allocator took from the GPU.",
    "*CPU's share* is the part of a step's time in which the CPU calls operators; in the rest of",
    "the step it waits for the GPU. In rows with `expandable_segments:True`, the allocator has",
    "this setting. The authors of DTR published 94.3 % for BERT-base and 96.5 % for BERT-large",
    "with twice the batch, and 93.2 % for GPT-2 with three times the batch.",
    "",
    "The groups of checks are: *bits*, *in place*, *triton* and *compiled* (results equal those of",
    "plain PyTorch), *captured* (CUDA graphs), *races* (operators on two streams wait for each",
    "other where they must), *no_waiting* (the CPU never waits for the GPU), *memory* (the peak is",
    "within the budget, for each setting of the allocator), *swap*, *chosen kernels* (convolutions",
    "whose kernel cuDNN chooses by time), *faults* (the step after an error is right),",
    "*world_of_one* (DDP and FSDP2 with one rank). The stage *hosts* has no checks: it measures",
    "the second table.",
]


def _on_device(found: dict[str, Any]) -> str:
    """Return the tables of one run on a GPU.

    The tables show which checks hold, the CPU's time of a step, and the throughput of larger
    batches within the memory of a smaller batch.
    """
    version, commit = found["versions"]["torch"], found["commit"][:9]
    said = f"`{found['command']}`, {found['device']}, torch {version}, commit `{commit}`."
    parts = [said, "", found["remarks"], ""]
    checks = [
        [f"{each['stage']} {each['setting']}", *_held(each["lines"]), each["ended"] or "done"]
        for each in found["stages"]
        if not each["stage"].startswith("speed")
        and (each["ended"] or any("check" in line for line in each["lines"]))
    ]
    parts += table_of(["group of checks", "hold", "checks", "ended"], checks)
    lines = [line for each in found["stages"] for line in each["lines"]]
    hosts = [
        [line["host of"], line["calls"], line["plain ms"], line["watched ms"],
         line["within half ms"], line["within half, recomputed"]]
        for line in lines if "host of" in line
    ]  # fmt: skip
    heads = ["CPU time of a small batch in bfloat16", "operator calls", "plain ms",
             "budget without a limit, ms", "half of the activations, ms",
             "recomputed operators"]  # fmt: skip
    parts += ["", *table_of(heads, hosts)] if hosts else []
    optimizers = {line["optimizer"]: line["ms a step"] for line in lines if "optimizer" in line}
    if optimizers:
        parts += ["", "Milliseconds of a step of fused AdamW with 300 small parameters, in plain "
                  "PyTorch (*plain*), in a budget without a limit (*watched*), and in a budget of "
                  "1 GiB, which evicts nothing (*within*): "
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
                 "reserved MiB", "recomputed operators", "CPU's share"]  # fmt: skip
        parts += ["", *table_of(heads, table)]
    return "\n".join(parts) + "\n"


def _over(row: dict[str, Any], base: dict[str, float]) -> str:
    """Return the throughput divided by that of the plain run, or "" if there is no plain run."""
    plain = base.get(row["model"])
    return f"{row['rows/s'] / plain:.1%}" if plain else ""


def _allocator(row: dict[str, Any]) -> str:
    return f" ({row['allocator']})" if row["allocator"] else ""


def _held(lines: Iterable[dict[str, Any]]) -> tuple[int, int]:
    checks = [line["ok"] for line in lines if "check" in line]
    return sum(checks), len(checks)


def peers() -> str:
    """Return the section on other tools.

    For each tool and each of several memory limits, it has the time of the fastest setting of the
    tool that needs no more memory than the limit.
    """
    found = load("peers")
    if not found:
        return ""
    rows = [row for row in found["rows"] if "time" in row]
    limits = (0.75, 0.51, 0.26, 0.16)  # a little above the budgets, because allocations are rounded
    methods = list(dict.fromkeys(row["method"] for row in rows))
    parts = ["## Compared with other tools", "", said(found), ""]
    parts += [
        "How much time does a step take if it may use only a share of its activation memory? Each",
        "tool was tried with several settings. The column *within 51%* shows the time over plain",
        "of the fastest setting whose measured activation memory is at most 51 % of that in plain",
        "PyTorch. A cell is empty if no setting needs so little memory. The last column is the",
        "share of the setting that needs the least memory. The memory of all tools is measured by",
        "PyTorch's profiler, which reports each allocation and each free. *Checkpoint* is",
        "`torch.utils.checkpoint` around blocks, and *selective* is its selective variant. The",
        "first cell of a table names the processor on which its rows were measured.",
    ]
    parts += several_runs(found["rows"])
    for model in dict.fromkeys(row["model"] for row in rows):
        parts += ["", f"### {model}"]
        for cpu, measured in by_machine(row for row in rows if row["model"] == model).items():
            table = []
            for method in methods:
                mine = [row for row in measured if row["method"] == method]
                if not mine:
                    continue
                best = [
                    min((r["time"]["median"] for r in mine if r["memory"] <= limit), default=None)
                    for limit in limits
                ]
                least = min(row["memory"] for row in mine)
                table.append([method, *(cell(each) for each in best), f"{least:.0%}"])
            heads = [cpu, *(f"within {limit:.0%}" for limit in limits), "least memory"]
            parts += ["", *table_of(heads, table)]
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
    parts += [
        "The table compares three methods: *planned* is a plan that runs eagerly; *compiled plan*",
        "is a plan in which Inductor compiles small groups of cheap operators; *torch.compile* is",
        "the whole model compiled, without a budget. *Memory* is the measured memory as a share of",
        "the activations, and *peak over budget* is the memory peak divided by the budget.",
        "*Seconds to build* is the time until the first step ends, compilation included. *Same",
        "bits* compares with the same compiled code without a budget, not with plain PyTorch. In",
        "the section above, the rows *rekindle compiled* were measured with an earlier version.",
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
        "How much larger can a batch be within the memory that plain PyTorch needs for a base",
        "batch, and how fast does it train? Throughput is samples per second, divided by those of",
        "plain PyTorch with the base batch: median (minimum-maximum). The columns *1x*, *2x* and",
        "*3x* have batches of one, two and three times the base batch; the last column has the",
        "largest batch that fits. The rows *plain* show plain PyTorch, whose larger batches use",
        "more memory than the limit. Each plan was searched for",
        f"{found['seconds_for_a_plan']:.0f} seconds.",
        "[Published for DTR on GPUs](https://marisa.moe/dtr.html): twice the batch at 94.3 %",
        "(BERT-base) and 96.5 % (BERT-large), three times the batch at 93.2 % (GPT-2). The first",
        "cell of a table names the model, and the processor on which its rows were measured.",
    ]
    parts += several_runs(found["rows"])
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        of_model = (row for row in found["rows"] if row["model"] == model)
        for cpu, measured in by_machine(of_model).items():
            methods: dict[str, dict[str, dict[str, Any]]] = {}
            for row in measured:
                methods.setdefault(row["method"], {})[row["at"]] = row
            table = [
                [method, *(throughput(at.get(each)) for each in ("1x", "2x", "3x")), most(at)]
                for method, at in methods.items()
            ]
            heads = [f"{model}, {cpu}", "1x", "2x", "3x", "largest: throughput"]
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
    parts += [
        "The first table shows what a budget costs if it is so large that nothing is evicted:",
        "the microseconds that it adds to each operator. *Operators* is the number of operators",
        "that a step runs.",
        "",
    ]
    rows = [
        [name, row["operators"], f"{row['added_us_per_operator']:.1f}", spread(row["ratio"])]
        for name, row in found["overhead"].items()
    ]
    heads = ["nothing evicted", "operators", "us added to each", "time over plain"]
    parts += table_of(heads, rows)
    rows = [
        [name, *(spread(row[share]["ratio"]) for share in ("1/2", "1/3"))]
        for name, row in found["step_time"].items()
    ]
    parts += [
        "",
        "The second table shows the time over plain if the budget allows a half, or a third, of",
        "the activations.",
        "",
    ]
    parts += table_of(["time over plain", "half the activations", "a third"], rows)
    rows = [
        [name, f"{row['fraction']:.0%}", f"{row['program_holds']:.0%}"]
        for name, row in found["smallest"].items()
    ]
    parts += [
        "",
        "The third table shows the smallest budget with which each model trains. The last column",
        "is the memory that variables of the program hold and that operators need at once. It is",
        "measured as the peak of a forward pass for which autograd saves nothing.",
    ]
    heads = ["share of the activations", "smallest budget", "held by variables"]
    return "\n".join([*parts, "", *table_of(heads, rows)]) + "\n"


def policies() -> str:
    found = load("policies")
    if not found:
        return ""
    parts = ["## Policies", "", said(found), ""]
    parts += [
        "A policy decides which values to evict. The table compares policies by simulation of",
        "recorded training steps. A *case* is a program and a budget. There are three budgets for",
        "each program: 50, 30 and 15 %, on a scale from the smallest budget for which a schedule",
        "could exist (0 %) to the peak when everything is kept (100 %).",
        "*Over h_DTR* is the recomputation time of a policy divided by that of h_DTR, the policy",
        "of the DTR paper, as a geometric mean over all cases. *Less* and *more* count the cases",
        "with less and with more recomputation than h_DTR. *Within 1.5* counts the cases whose",
        "recomputation is at most 1.5 times the proven lower bound, of those for which a bound is",
        "known. *No room* counts the cases in which the program ran out of its budget. The default",
        "policy is *thrifty*. It was tuned on the programs of the group *chosen on*, and on no",
        "others.",
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
        "How much less is recomputed when `rekindle.budget` follows a plan that it has learned? "
        "The figures are the recomputation time divided by the computation time of a step. The "
        "second column is the budget, as a share of the activations. No schedule recomputes less "
        "than the lower bound."
    )
    heads = ["model", "activations", "online", "learned", "lower bound"]
    parts = ["## Learned schedules", "", said(found), "", text, ""]
    return "\n".join([*parts, *table_of(heads, rows)]) + "\n"


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
    heads = ["graph", "budget", "Cuts", "lower bound", "seconds", "Rotor", "Chen", "DTR"]
    about = found["about"]
    command = f"`{about['command']}`, {about['cpu']}, {about['cores']} cores."
    text = (
        "Before a step runs, a planner computes which values to keep and which to recompute. The "
        "percentages are the recomputation time of each planner's plan, divided by the computation "
        "time. *Budget* is a share of the peak when everything is kept. *Cuts* is the default "
        "planner, and *seconds* is its search time. It also proves the *lower bound*: no schedule "
        "recomputes less. *DTR* is no planner but a simulated online run with the policy of the "
        "DTR paper, for comparison. An empty cell means that a planner found no plan or was not "
        "tried."
    )
    parts = ["## Planners", "", command, "", text, ""]
    return "\n".join([*parts, *table_of(heads, rows)]) + "\n"


def scale() -> str:
    """Return the section on the time of an eviction, by the number of values in memory."""
    found = load("simulator_scale")
    if not found:
        return ""
    rows = [
        [f"{row['resident_values']:,}", row["evictions"], row["microseconds_per_eviction"]]
        for row in found["rows"]
    ]
    heads = ["values in memory", "evictions", "us for each eviction"]
    text = (
        "Before each eviction the policy searches for the value with the lowest score. The table "
        "shows the time of one eviction by the number of values in memory. It is measured in the "
        "simulator, with the engine written in Python."
    )
    parts = ["## Cost of an eviction", "", said(found), "", text, "", *table_of(heads, rows)]
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
        f"One training step of each of {counts['tried']} architectures of the libraries",
        "transformers and diffusers was compared with plain PyTorch, with small random weights.",
        "The budget is 30 % of the activations. If an architecture does not train within it, the",
        f"budget is the smallest with which it does. {counts['equal']} architectures give the same",
        f"bits. {', '.join(counts['unstable'])} cannot be compared: already two runs in plain",
        "PyTorch differ from each other.",
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
        f"`rekindle.plan` was tried on {counts['tried']} architectures. With a large budget,",
        f"{counts['roomy']} gave the same bits as plain PyTorch. For {counts['refused']},",
        "`rekindle.plan` raised an error that says why it cannot plan them. Of those with the same",
        f"bits, {exact} were traced while `torch.compiler.is_compiling()` was false, as in plain",
        "PyTorch. The others cannot be traced so. They were traced while it was true, which lets",
        "a model run code that is meant for compilers. These architectures were also planned",
        "within 40 % of their activations. If no plan was found for that budget, the smallest was",
        f"used for which one was found. Here {counts['40%']} of {len(tried)} gave the same bits.",
        "Architectures with other bits or an unexpected error:",
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
    heads = ["what was run, and the command", "tried", "same bits", "excepted", "different"]
    text = (
        "PyTorch's own test samples of operators (opinfo), modules and optimizers ran with "
        "everything evicted after every operator; random programs (fuzz) ran within a small "
        "budget. *Tried* counts samples or programs. *Same bits* counts those whose results equal "
        "plain PyTorch's, bit for bit. *Excepted* counts known differences that have a reason in "
        "PyTorch itself. *Different* counts all other differences."
    )
    parts = ["## Operators, modules, optimizers, random programs", "", text, ""]
    return "\n".join([*parts, *table_of(heads, rows)]) + "\n"


def archived() -> str:
    """Return the sections whose programs left the repository."""
    return (ROOT / "benchmarks" / "archived.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
