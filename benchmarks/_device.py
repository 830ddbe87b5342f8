"""Write the parts of docs/benchmarks.md on GPUs: the throughput, and the checks of the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _tables import load, table_of

_METHODS = {
    "plain": "plain",
    "watched": "`budget(None)`, smaller batch",
    "plain, beyond the memory": "plain, larger batch, more memory",
    "online": "`budget`",
    "learned": "`budget`, learned plan",
    "swap": "`budget(swap=...)`",
    "online, in that device": "`budget`, limited device",
    "of reserved": '`budget(of="reserved")`',
}


def throughput() -> str:
    """Return the section on larger batches within the memory of a smaller batch."""
    runs = load("on_device").get("runs", [])
    if not runs:
        return ""
    measured = [list(_measured(run)) for run in runs]
    keys = dict.fromkeys(key for run in measured for key, _, _ in run)
    by_key = [{(key, bf16): row for key, bf16, row in run} for run in measured]
    base = [
        {(row["model"], bf16): row["rows/s"] for key, bf16, row in run if key[1] == "plain"}
        for run in measured
    ]
    table = []
    for model, method, allocator in sorted(keys, key=_order):
        if method == "plain":
            continue
        cells = [
            _over(found.get(((model, method, allocator), bf16)), plain.get((model, bf16)))
            for found, plain in zip(by_key, base, strict=True)
            for bf16 in (False, True)
        ]
        newest = by_key[0].get(((model, method, allocator), False))
        setting = allocator.removesuffix("_segments:True")
        name = _METHODS[method] + (f", {setting}" if setting else "")
        reserved = by_key[0].get(((model, "plain", ""), False), {}).get("reserved MiB")
        part = f"{newest['reserved MiB'] / reserved:.0%}" if newest and reserved else ""
        table.append([model, name, *cells, part])
    heads = [f"{each}, run {n}" for n in range(1, len(runs) + 1) for each in ("fp32", "bf16")]
    parts = ["## On a GPU", "", *_ABOUT, ""]
    parts += [f"{number}. {_origin(run)}" for number, run in enumerate(runs, 1)]
    parts += ["", *table_of(["model", "method", *heads, "reserved"], table)]
    return "\n".join(parts) + "\n"


_ABOUT = [
    "How fast does a larger batch train within the memory that plain PyTorch needs for a smaller",
    "batch (twice for BERT, three times for GPT-2)? Figures are samples per second, divided by",
    "those of plain PyTorch with the smaller batch in the same run. Figures of different runs do",
    "not compare. An empty cell was not measured.",
    "",
    "- *`budget`*: the budget is the peak of the tensors of the plain run, on a device with all",
    "  its memory and PyTorch's default allocator.",
    "- *Limited device*: the device has only the memory that the allocator reserved in the plain",
    "  run.",
    '- *`of="reserved"`*: this memory is the budget, on a device with all its memory.',
    "- *Expandable*: the allocator has `expandable_segments:True`.",
    "- *Reserved*: what the allocator took from the device, over the plain run (run 1, fp32).",
    "",
    "The authors of DTR published 94.3 % for BERT-base, 96.5 % for BERT-large, 93.2 % for GPT-2.",
    "Do not rely on BERT's figures in bf16: in most of its runs the CPU calls operators for more",
    "than 80 % of a step, so figures above 100 % show a slow plain run. The runs, newest first:",
]


def newest_share(model: str, method: str) -> str:
    """Return what `method` reaches in the newest run, in float32 and with the default allocator."""
    rows = {key: row for key, bf16, row in _measured(load("on_device")["runs"][0]) if not bf16}
    return _over(rows[model, method, ""], rows[model, "plain", ""]["rows/s"])


def checks() -> str:
    """Return the section on the checks that the runs of `scripts/on_device` made."""
    runs = load("on_device").get("runs", [])
    if not runs:
        return ""
    found = [dict(_checks(run)) for run in runs]
    groups = dict.fromkeys(group for run in found for group in run)
    rows = [[group, *(run.get(group, "") for run in found)] for group in groups]
    numbers = range(1, len(runs) + 1)
    parts = ["## Self-tests on a GPU", "", *_ABOUT_CHECKS, ""]
    parts += table_of(["checks that hold", *(f"run {number}" for number in numbers)], rows)
    times = [[f"run {number}", *_times(run)] for number, run in zip(numbers, runs, strict=True)]
    heads = ["ms of a step", "BERT", "no limit", "half", "AdamW", "no limit", "1 GiB"]
    parts += ["", *_ABOUT_TIMES, "", *table_of(heads, times)]
    return "\n".join(parts) + "\n"


_ABOUT_CHECKS = [
    "`scripts/on_device` also checks Rekindle; the runs are [those above](#on-a-gpu). *Bits*, *in",
    "place*, *triton* and *compiled*: results equal plain PyTorch's. *Captured*: CUDA graphs.",
    "*Races*: operators on two streams wait for each other where they must. *No_waiting*: the CPU",
    "never waits for the GPU. *Memory*: the peak is within the budget. *Chosen kernels*:",
    "convolutions whose kernel cuDNN chooses by time. *Faults*: the step after an error is right.",
    "*World_of_one*: DDP and FSDP2 with one rank. With torch 2.11, compiled code and FSDP2 are",
    "refused; these checks hold if the error says so.",
]
_ABOUT_TIMES = [
    "The next table has batches so small that the GPU waits for the CPU: BERT-base in bfloat16",
    "(2214 operator calls), in plain PyTorch, without a limit and within half of the activations;",
    "and fused AdamW with 300 small parameters, plain, without a limit and within 1 GiB.",
]


def _measured(run: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], bool, dict[str, Any]]]:
    """Yield the model, method and allocator, whether it was bfloat16, and the figures."""
    for each in run["stages"]:
        for row in each["lines"]:
            if "rows/s" in row:
                yield (row["model"], row["method"], row["allocator"]), row["bf16"], row


def _order(key: tuple[str, str, str]) -> tuple[str, str, int]:
    model, method, allocator = key
    return model, allocator, list(_METHODS).index(method)


def _over(row: dict[str, Any] | None, plain: float | None) -> str:
    return f"{row['rows/s'] / plain:.1%}" if row and plain else ""


def _origin(run: dict[str, Any]) -> str:
    version, commit = run["versions"]["torch"], run["commit"][:9]
    return (
        f"`{run['command']}`, {run['device']}, torch {version}, commit `{commit}`. {run['remarks']}"
    )


def _checks(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each group of checks, and how many of its checks hold."""
    for each in run["stages"]:
        if each["stage"].startswith(("speed", "hosts")):
            continue
        results = [line["ok"] for line in each["lines"] if "check" in line]
        if results or each["ended"]:
            ended = f" ({each['ended']})" if each["ended"] else ""
            yield (
                f"{each['stage']} {each['setting']}".strip(),
                (f"{sum(results)} of {len(results)}{ended}"),
            )


def _times(run: dict[str, Any]) -> list[object]:
    lines = [line for each in run["stages"] for line in each["lines"]]
    host = next(line for line in lines if "host of" in line)
    optimizer = {line["optimizer"]: line["ms a step"] for line in lines if "optimizer" in line}
    of_host = [host[key] for key in ("plain ms", "watched ms", "within half ms")]
    return [*of_host, *(optimizer[key] for key in ("plain", "watched", "within"))]
