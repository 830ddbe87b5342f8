"""Call the public functions with a model on the device, as the documentation shows them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rekindle
from tests.on_device import workloads
from tests.on_device.blocks import batch, blocks, training
from tests.on_device.machine import Line, Machine, check, same
from tests.on_device.programs import mlp

MIB = 2**20


def public(machine: Machine) -> Iterator[Line]:
    """Call each public function; an error fails the check of that function only."""
    for name, call in _CALLS.items():
        torch.manual_seed(0)
        machine.start_anew()
        try:
            ok, more = call(machine)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            yield check(f"public: {name}", False, error=text[-2500:])
        else:
            yield check(f"public: {name}", ok, **more)


_Result = tuple[bool, Line]


def _auto(machine: Machine) -> _Result:
    """Train within what is free on the device."""
    plain = machine.trained(mlp)
    took = machine.trained(mlp, 3, "auto")
    return same(took.values, plain.values), {"budget": took.run.budget, "peak": took.run.peak}


def _profile(machine: Machine) -> _Result:
    """Predict the peak of a step and the smallest budget, and train within that budget."""
    plain = machine.trained(mlp)
    _, step = mlp(machine)
    step()
    found = rekindle.profile(step, device=machine.kind)
    least = found.smallest_budget
    took, worked = machine.within(mlp, least)
    figures = {"peak": found.peak, "plain peak": plain.peak, "least": least, "worked": worked}
    near = abs(found.peak - plain.peak) <= 0.05 * plain.peak + 2 * MIB
    return near and worked <= 1.05 * least and same(took.values, plain.values), figures


def _verify(machine: Machine) -> _Result:
    plain = machine.trained(mlp)
    _, step = mlp(machine)
    step()
    found = rekindle.verify(step, budget=plain.budget(0.5))
    return found.ok, {"recomputations": found.recomputations, "table": str(found)[:1000]}


def _max_batch(machine: Machine) -> _Result:
    """Find the largest batch within twice the memory of a batch, and train with it."""
    model = blocks(machine)
    width = machine.size(512, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def steps(rows: int) -> Callable[[], None]:
        x = torch.randn(rows, width, device=machine.kind)
        return training(model, lambda: model(x).square().mean(), optimizer)[1]

    amount = 2 * machine.trained(mlp).peak
    rows = rekindle.max_batch(steps, budget=amount, device=machine.kind, at_most=1 << 16)
    step = steps(rows)
    with rekindle.budget(amount, device=machine.kind) as run:
        step()
        step()
    figures = {"rows": int(rows), "slowdown": rows.slowdown, "peak": run.peak, "budget": amount}
    return run.peak <= amount and rows >= machine.size(2048, 64), figures


def _estimate(machine: Machine) -> _Result:
    plain = machine.trained(mlp)
    found = rekindle.estimate(blocks(machine), batch(machine), optimizer=torch.optim.Adam)
    near = abs(found.peak - plain.peak) <= 0.1 * plain.peak + 12 * MIB
    return near, {"estimate": found.peak, "plain peak": plain.peak}


def _gradients(model: nn.Module, apply: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    apply(x).square().mean().backward()
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def _near(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return True if the tensors are equal within rounding, as Inductor rounds differently."""
    return all(torch.allclose(a, b, 1e-3, 1e-6) for a, b in zip(one, other, strict=True))


def _compare(
    machine: Machine,
    made: Callable[[nn.Module, Tensor], Any],
    equal: Callable[[list[Tensor], list[Tensor]], bool] = same,
) -> _Result:
    """Compare gradients of a model with those of what `made` returns for it."""
    model, x = blocks(machine, dropout=0.0), batch(machine)
    wanted = _gradients(model, model, x)
    ours = made(model, x)
    machine.start_anew()
    before = torch.cuda.memory_allocated() if machine.is_cuda else 0
    got = _gradients(model, ours, x)
    added = torch.cuda.max_memory_allocated() - before if machine.is_cuda else 0
    return equal(wanted, got), {"added MiB": added // MIB, "type": type(ours).__name__}


def _budget(machine: Machine) -> int:
    """Return seven tenths of the peak of training the blocks, optimizer included."""
    return int(0.7 * machine.trained(mlp).peak)


def _plan(machine: Machine, *, compiled: bool = False) -> _Result:
    def made(model: nn.Module, x: Tensor) -> Any:
        return rekindle.plan(model, (x,), budget=_budget(machine), compile=compiled).apply()

    return _compare(machine, made, _near if compiled else same)


def _sequential(machine: Machine) -> _Result:
    return _compare(machine, lambda model, x: rekindle.sequential(model, x, _budget(machine)))


def _backend(machine: Machine) -> _Result:
    return _compare(
        machine,
        lambda model, x: torch.compile(
            model, backend=rekindle.backend(_budget(machine), inner="eager")
        ),
    )


def _export(machine: Machine) -> _Result:
    def made(model: nn.Module, x: Tensor) -> Any:
        step = training(model, lambda: model(x).square().mean())[1]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        step()
        found = rekindle.export(model, step, _budget(machine))
        model.load_state_dict(state)
        found.apply(model)
        return model

    return _compare(machine, made)


_SCRIPT = """
import torch
kind = {kind!r}
torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (torch.nn.Linear({width}, {width}), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).to(kind)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(4):
    loss = model(torch.randn({rows}, {width}, device=kind)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


def _command(machine: Machine) -> _Result:
    """Profile a script, and run it within a budget: it must print what it prints without one."""
    script = _SCRIPT.format(
        kind=machine.kind, width=machine.size(512, 32), rows=machine.size(8192, 64)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(script, encoding="utf-8")

        def ran(*command: str) -> tuple[str, str]:
            result = subprocess.run(
                [sys.executable, *command, str(path)],
                capture_output=True, text=True, timeout=90, env=os.environ,
            )  # fmt: skip
            assert result.returncode == 0, result.stderr[-2000:]
            return result.stdout, result.stderr

        plain, _ = ran()
        profile, _ = ran("-m", "rekindle", "run", "--profile")
        html = Path(folder) / "run.html"
        amount = "24MiB" if not machine.is_cuda else "150MiB"
        report = ("--report", "html", str(html))
        within, said = ran("-m", "rekindle", "run", "--budget", amount, *report)
        ok = within.splitlines()[:4] == plain.splitlines()[:4] and html.stat().st_size > 1000
        return ok, {"profile": profile[-1500:], "report": said[-1500:]}


def _hugging_face(machine: Machine) -> _Result:
    """Train GPT-2 of transformers in bfloat16 within half of its activations."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except Exception as error:  # transformers may not fit this version of torch
        return True, {"left out": repr(error)[:300]}

    def program(machine: Machine) -> Any:
        sizes = machine.size(768, 32), machine.size(6, 2), machine.size(12, 2)
        width, layers, heads = sizes
        config = GPT2Config(vocab_size=machine.size(50257, 50), n_embd=width, n_layer=layers,
                            n_head=heads, n_positions=256)  # fmt: skip
        model = GPT2LMHeadModel(config).to(machine.kind)

        def loss() -> Tensor:
            tokens = torch.randint(config.vocab_size, (8, machine.size(256, 16)))
            tokens = tokens.to(machine.kind)
            with torch.autocast(machine.kind, torch.bfloat16):
                return model(input_ids=tokens, labels=tokens).loss

        return training(model, loss)

    plain, again = machine.trained(program), machine.trained(program)
    took, amount = machine.within(program, plain.budget(0.5))
    repeatable = same(plain.values, again.values)
    figures = {"budget": amount, "plain peak": plain.peak, "peak": took.peak,
               "recomputations": took.run.recomputations, "repeatable": repeatable}  # fmt: skip
    return same(took.values, plain.values) or not repeatable, figures


def _learned(machine: Machine) -> _Result:
    """Follow a learned plan in most steps, with and without copies to the host."""

    def program(machine: Machine) -> Any:
        return workloads.language(machine, workloads.bert(machine), machine.size(8, 4), 128)

    plain = machine.trained(program, 12)
    figures: Line = {}
    ok = True
    for swap in (None, "8GiB"):
        options: dict[str, Any] = {"learn": "wait", "cache": False, "swap": swap}
        took, _ = machine.within(program, plain.budget(0.5), 12, **options)
        followed = took.run.steps_followed
        equal = same(took.values, plain.values)
        figures |= {f"followed, swap {swap}": followed, f"equal, swap {swap}": equal}
        ok = ok and equal and (followed > 0 or machine.tiny)
    return ok, figures


_CALLS: dict[str, Callable[[Machine], _Result]] = {
    'budget("auto")': _auto,
    "profile": _profile,
    "verify": _verify,
    "max_batch": _max_batch,
    "estimate": _estimate,
    "plan": _plan,
    "plan, compiled": partial(_plan, compiled=True),
    "sequential": _sequential,
    "backend": _backend,
    "export": _export,
    "rekindle run": _command,
    "GPT-2 of transformers": _hugging_face,
    "learned plans": _learned,
}
