"""Run programs on the stand-in device (a simulated `cuda`), and print what was found as JSON.

Usage: `python -m tests.standin.answers EXTENSION QUESTION...`. A question names a program, a mode
(settings of the budget) and a schedule of the streams, such as "mlp, native, late". It may then
name parts of Rekindle to disable: "mlp, native, swap, side first, streams reported".
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.standin.device import install

STANDIN = install(Path(sys.argv[1]))  # before anything imports torch

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

import rekindle  # noqa: E402
from rekindle.pytorch.context import _budget as budgets  # noqa: E402
from rekindle.pytorch.context._auto import available  # noqa: E402
from rekindle.pytorch.native import Driver  # noqa: E402
from rekindle.pytorch.native import core as native_core  # noqa: E402
from rekindle.pytorch.optimizers import _undo  # noqa: E402
from rekindle.pytorch.swap import Copies, Transfers  # noqa: E402
from rekindle.pytorch.swap._pinned_store import PinnedStore  # noqa: E402
from rekindle.pytorch.swap._streams import Streams  # noqa: E402
from tests.native.journals import HELD, KINDS, Replay  # noqa: E402
from tests.pytorch.scenes.world import Own  # noqa: E402
from tests.standin.captures import captured  # noqa: E402
from tests.standin.faults import FAULTS  # noqa: E402
from tests.standin.orders import ORDERS  # noqa: E402
from tests.standin.programs import PROGRAMS, STEPS, blocks  # noqa: E402
from tests.standin.scaled import scaled_plans  # noqa: E402
from tests.standin.timed import timed, timed_plans  # noqa: E402

MODES: dict[str, dict[str, Any]] = {
    "native": {},
    "native, learned": {"learn": "wait"},
    "native, anything": {"evict": "anything"},
    "native, swap": {"swap": "1GiB"},
    # Swap all values that fit, whatever the cost:
    "native, swapped": {"swap": rekindle.policies.Swap(only=True)},
    "native, full": {},  # modes on a device with less memory than the budget
    "native, reserved": {"of": "reserved"},
    "native, swapped, full": {"swap": rekindle.policies.Swap(only=True)},
    "native, oldest, full": {"policy": rekindle.policies.LRU()},
    # Modes whose evictions do not depend on measured times:
    "native, oldest": {"policy": rekindle.policies.LRU()},
    "native, same price": {},  # equal costs for all operators
    "native, harsh": {},  # evicts all that may be evicted before each operator
}
FRACTION = 0.6
WIDTH = 1000
#: Modes whose budget has no limit, so that only the memory of the device limits them.
GIVEN: dict[str, int | None] = {"native, swapped, full": None}
#: Larger budgets, as fractions of the peak, for two programs with convolutions. The core recomputes
#: the backward pass of a convolution only after trials gave equal bits. These programs end before
#: that, so results of these backward passes cannot be evicted.
MORE = {f"{name}, native, anything": 0.85 for name in ("convolutions", "timed_convolutions")}

#: Options of the budget for programs that capture a CUDA graph.
OPTIONS: dict[str, dict[str, Any]] = {
    "swapped": {"swap": rekindle.policies.Swap(only=True)},
    "anything": {"evict": "anything"},
    "auto": {},
}

#: How the simulated device orders the work of streams, by the name of the schedule. The two flags
#: say whether the default stream, and whether the other streams, run as late as possible.
SCHEDULES = {
    "prompt": (False, False),
    "late": (True, True),
    "side first": (True, False),
    "side last": (False, True),
}
#: Smaller budgets, as fractions of the peak, for programs in which the order of streams makes a
#: difference only with a tight budget.
FRACTIONS = {
    "streams_in_turn": 0.4,
    "streams_in_turn, native, same price": 0.42,
    "a_side_stream": 0.35,
}


def _trained(name: str, **budget: Any) -> tuple[list[torch.Tensor], int, Any]:
    """Return parameters and buffers after training, the allocator's peak, and the last run."""
    torch.manual_seed(0)
    STANDIN.atomics(True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    model, step = PROGRAMS[name]()
    run = None
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        if budget:
            with rekindle.budget(**budget) as run:
                step()
        else:
            step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return [value.detach().cpu() for value in model.state_dict().values()], peak, run


@contextmanager
def _without(missing: Sequence[str], *, harsh: bool) -> Iterator[None]:
    """Disable parts of Rekindle while open; with `harsh`, evict before each operator."""
    make = Driver.__init__

    def made(driver: Driver, *args: Any) -> None:
        make(driver, *args)
        driver.core.evict_before_every_op(driver.handle, harsh)
        driver.core.list_recomputed_ops(driver.handle)
        for name in missing:
            driver.core.disable_for_tests(driver.handle, name)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Driver, "__init__", made))
        for name in missing:
            for where, attribute, instead in MUTANTS.get(name, ()):
                stack.enter_context(patch.object(where, attribute, instead))
        yield


def _copying_at_once(way: str) -> Any:
    """Return a replacement for copies in one direction that does not wait before the copy."""
    copy = PinnedStore._copy

    def instead(store: Any, into: Any, source: Any, stream: Any, home: Any) -> Any:
        at_once = stream is getattr(store, way)
        with patch.object(Streams, "wait_on", _none) if at_once else nullcontext():
            return copy(store, into, source, stream, home)

    return instead


def _going_on(*, out: bool) -> Any:
    """Return a replacement for `Transfers.wait` that skips waits for copies in one direction."""
    wait, missing = Transfers.wait, out

    def instead(transfers: Any, way: Any, nbytes: int, *, out: bool) -> None:
        with patch.object(Streams, "wait_for", _none) if out == missing else nullcontext():
            wait(transfers, way, nbytes, out=out)

    return instead


def _none(*_: Any) -> None:
    """Do nothing; used as a replacement for disabled functions."""


def _least() -> dict[str, Any]:
    """Train on vectors whose size the allocator rounds up, within the smallest possible budget."""

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.rand(WIDTH).cuda().requires_grad_()
        x = weight
        for _ in range(4):
            x = functional.dropout(x.sin() * torch.rand(WIDTH, device="cuda"), 0.3).exp()
            x = x * torch.rand(WIDTH).cuda()
        loss = x.sum()
        del x
        loss.backward()
        return [loss.cpu(), weight.grad.cpu(), torch.cuda.get_rng_state()]

    wanted, budget = step(), 100
    while True:
        torch.cuda.reset_peak_memory_stats()
        try:
            with rekindle.budget(budget, device="cuda") as run:
                values = step()
                peak = torch.cuda.max_memory_allocated()
        except rekindle.OutOfBudget as error:
            budget = error.smallest_budget
            continue
        run._driver.engine.check()
        return {
            "equal": all(map(torch.equal, values, wanted)),
            "peak over budget": peak / budget,
            "recomputations": run.recomputations,
        }


def _dropped(streams: str) -> dict[str, Any]:
    """Start a swap-in early and delete the value before any wait, so that its memory is reused."""
    STANDIN.late(*SCHEDULES[streams])
    device = torch.device("cuda", 0)
    store = PinnedStore(1 << 30, device, Streams(device))
    written = store.write(torch.ones(WIDTH, device=device).untyped_storage())
    assert written is not None
    key, way = written
    way.wait()
    home = store.new_home(4 * WIDTH)
    address, back = home.data_ptr(), store.read(key, home)
    del home, back
    other = torch.zeros(WIDTH, device=device)
    torch.cuda.synchronize()
    return {"equal": not other.any().item(), "same place": other.data_ptr() == address}


def _auto(streams: str, *missing: str) -> dict[str, Any]:
    """Return the amounts of a budget of "auto": when it begins, and after each of two steps.

    Before the first step, another process takes memory of the device, or frees some.
    """
    STANDIN.late(*SCHEDULES[streams])
    found: dict[str, Any] = {}
    for what, megabytes in (("less", 48), ("more", 160)):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        STANDIN.limit(0, 80 << 20)
        torch.manual_seed(0)
        model, step = PROGRAMS["large"]()
        within = rekindle.budget("auto", device="cuda")
        with ExitStack() as stack:
            for name in missing:
                stack.enter_context(patch.object(budgets, name, lambda *_: None))
            run = stack.enter_context(within)
            said = [run.budget]
            STANDIN.limit(0, megabytes << 20)
            for _ in range(2):
                step()
                torch.cuda.synchronize()
                said.append(run.budget)
            there = available(torch.device("cuda", 0))
        found[what] = {"budgets": said, "there": there}
        found.setdefault("weights", []).append([each.sum().item() for each in model.parameters()])
        del model, step, run, within
    STANDIN.limit(0, 4 << 30)
    one, other = found.pop("weights")
    return found | {"equal": one == other}


def _fails(streams: str) -> dict[str, Any]:
    """Return the error that the program gets if an event reports a device error.

    Also return the state of Rekindle afterwards, and if the next step is right.
    """
    STANDIN.late(*SCHEDULES[streams])
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)

    def step(layers: int) -> float:
        x = weight
        for _ in range(layers):
            x = (x @ weight).sin()
        x.sum().backward()
        assert weight.grad is not None
        found = weight.grad.sum().item()
        weight.grad = None
        return found

    expected = step(3)
    found: dict[str, Any] = {}
    with rekindle.budget("64MiB", device="cuda", learn=False) as run:
        step(3)
        torch.cuda.synchronize()
        STANDIN.fail_query(2)
        try:
            step(4)
        except RuntimeError as error:
            found["raised"] = str(error).splitlines()[0]
        STANDIN.fail_query(0)
        found["in flight"] = run._driver.core.in_flight(run._driver.handle)
        weight.grad = None
        found["equal"] = step(3) == expected
    return found


def _acts(name: str, streams: str) -> dict[str, Any]:
    """Compare the actions of the native core and of the Python engine in two steps of a program.

    Costs are fixed. Copies take about as long as recomputation, so that both happen.
    """
    STANDIN.late(*SCHEDULES["prompt"])
    core: Any = native_core()
    core.fix_costs(1_000)
    torch.manual_seed(0)
    _, step = PROGRAMS[name]()
    with rekindle.budget(None, device="cuda") as roomy:
        step()
    STANDIN.late(*SCHEDULES[streams])
    swap = rekindle.policies.Swap(1 << 30, out_bytes_per_s=10**10, in_bytes_per_s=10**10)
    amount = int(FRACTION * roomy.peak)
    make = Driver.__init__

    def made(driver: Driver, *args: Any) -> None:
        make(driver, *args)
        core.open_journal(driver.handle, 200_000)

    kinds = KINDS.split()
    outside = torch.cuda.memory_allocated()  # memory that is in use before the journal begins
    words = [kinds.index("makes"), 0, outside, 0, 0, 0, kinds.index("admit"), 0, 0, HELD, 0, 0]
    with (
        patch.object(Driver, "__init__", made),
        rekindle.budget(amount, device="cuda", swap=swap, learn=False) as run,
    ):
        driver: Any = run._driver
        step()
        step()
        words += chain.from_iterable(core.journal(driver.handle))
    core.check(driver.handle)
    policy = rekindle.policies.Thrifty()
    return {
        "compared": Replay(amount, policy, driven=True, swap=swap).compare(words),
        "swapped": getattr(run.report().swapped, "out", 0),
        "recomputations": run.recomputations,
        "evictions": run.evictions,
    }


#: Defects to plant in Rekindle, by name: each replaces a function that waits before or after a copy
#: by one that does not wait. `disable_for_tests` of the native core plants other defects.
MUTANTS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "keep_until_read": ((Streams, "keep_until_read", _none),),
    "waits of copies out": ((PinnedStore, "_copy", _copying_at_once("_out")),),
    "waits of copies back": ((PinnedStore, "_copy", _copying_at_once("_back")),),
    "waits for copies out": ((Transfers, "wait", _going_on(out=True)),),
    "waits for copies back": ((Transfers, "wait", _going_on(out=False)),),
    "streams reported": ((Copies, "see", _none),),
}

_plain: dict[str, tuple[list[torch.Tensor], int, int, int]] = {}


def _planned(streams: str) -> dict[str, Any]:
    """Compare training with a planned model (`rekindle.plan`) with the plain model."""
    torch.manual_seed(0)
    model, state = blocks(), blocks().state_dict()

    def trained(network: torch.nn.Module) -> tuple[list[torch.Tensor], int]:
        model.load_state_dict(state)
        torch.manual_seed(1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            network(torch.randn(256, 64, device="cuda")).pow(2).mean().backward()
            optimizer.step()
        values = [value.detach().cpu() for value in model.state_dict().values()]
        return values, torch.cuda.max_memory_allocated()

    STANDIN.late(*SCHEDULES["prompt"])
    expected, most = trained(model)
    plan = rekindle.plan(model, (torch.randn(256, 64, device="cuda"),), budget=int(0.8 * most))
    STANDIN.late(*SCHEDULES[streams])
    values, peak = trained(plan.apply())
    return {"equal": all(map(torch.equal, values, expected)), "peak over plain": peak / most}


def _small(*missing: str) -> dict[str, Any]:
    """Return how many tiny results fit after large ones have filled the budget.

    The program holds the large results. Also return the allocator's peak over the budget.
    """
    STANDIN.late(*SCHEDULES["prompt"])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    amount = torch.cuda.memory_allocated() + (64 << 20)
    held: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    with rekindle.budget(amount, device="cuda", evict="saved") as run:
        driver: Any = run._driver
        for name in missing:
            driver.core.disable_for_tests(driver.handle, name)
        for pieces, numbers, most in ((held, 1 << 18, 1_000), (small, 16, 100)):
            with suppress(rekindle.OutOfBudget):
                while len(pieces) < most:
                    pieces.append(torch.ones(numbers, device="cuda"))
    return {
        "large": len(held),
        "small": len(small),
        "peak over budget": torch.cuda.max_memory_allocated() / amount,
    }


def _undone() -> dict[str, Any]:
    """Undo a failed step of a custom optimizer. Half of the backup copies fit on the device."""
    model = blocks(256)
    model(torch.randn(8, 256, device="cuda")).pow(2).mean().backward()
    before = [weight.detach().cpu() for weight in model.parameters()]
    on_host: list[int] = []

    class Greedy(Own):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            copies = [each.copy for each in run._driver.undo._before.values()]
            on_host.append(sum(isinstance(each, _undo._Outside) for each in copies))
            super().step()
            torch.zeros(1 << 28, device="cuda")

    room = sum(weight.nbytes for weight in model.parameters())
    amount = torch.cuda.memory_allocated() + room // 2
    optimizer = Greedy(model.parameters(), 0.01)
    budget = rekindle.budget(amount, learn=False)
    with suppress(rekindle.OutOfBudget), budget as run:
        optimizer.step()
    after = [weight.detach().cpu() for weight in model.parameters()]
    return {
        "equal": all(map(torch.equal, before, after)) and not optimizer.state,
        "on the host": on_host,
        "weights": len(before),
        "peak over budget": run.peak / amount,
    }


#: Questions that are not modes of a program.
ALONE = (
    "planned", "least", "dropped", "auto", "acts", "fails", "small", "captured",
    "ordered", "refuses", "undone", "timed", "timed plans",
    "scaled plans",
)  # fmt: skip


def _parts(question: str) -> list[str]:
    """Return program, mode, schedule and disabled parts of a question."""
    name, *rest = question.split(", ")
    modes = sorted([*MODES, *ALONE], key=len, reverse=True)
    mode = next(mode for mode in modes if ", ".join(rest).startswith(mode))
    return [name, mode, *rest[len(mode.split(", ")) :]]


def _at_most(name: str, amount: int) -> int:
    """Return `amount` rounded up to whole segments (2 MiB) of the device's allocator."""
    segment = 2 << 20
    return max(-(-amount // segment), 1) * segment


def answer(question: str) -> dict[str, Any]:
    """Return the answer to a question: for most, whether bits are equal, and peak / budget."""
    name, mode, streams, *missing = _parts(question)
    if mode == "refuses":
        STANDIN.late(*SCHEDULES[streams])
        return FAULTS[name]()
    if mode == "ordered":
        STANDIN.late(*SCHEDULES[streams])
        return ORDERS[name](missing)
    if mode == "timed":
        STANDIN.late(*SCHEDULES[streams])
        return timed(STANDIN, float(name))
    if mode == "scaled plans":
        return scaled_plans(STANDIN, name)
    if mode == "timed plans":
        STANDIN.late(*SCHEDULES[streams])
        return timed_plans(STANDIN, float(name))
    if mode == "captured":
        STANDIN.late(*SCHEDULES[streams])
        return captured(name, OPTIONS[missing[0]])
    if mode == "planned":
        return _planned(streams)
    if mode == "small":
        return _small(*missing)
    if mode == "auto":
        return _auto(streams, *missing)
    if mode == "fails":
        return _fails(streams)
    if mode == "least":
        return _least()
    if mode == "dropped":
        return _dropped(streams)
    if mode == "undone":
        return _undone()
    if mode == "acts":
        return _acts(name, streams)
    if name not in _plain:
        STANDIN.late(*SCHEDULES["prompt"])
        before = STANDIN.states_set()
        values, peak, _ = _trained(name)
        _plain[name] = values, peak, torch.cuda.memory_allocated(), STANDIN.states_set() - before
    expected, most, constant, states_set = _plain[name]
    least, fraction = constant, MORE.get(f"{name}, {mode}", FRACTION)
    if name in FRACTIONS:
        least, fraction = 0, FRACTIONS.get(f"{name}, {mode}", FRACTIONS[name])
    amount = least + int(fraction * (most - least))
    STANDIN.late(*SCHEDULES[streams])
    core: Any = native_core()
    core.fix_costs(1_000 if mode.endswith("same price") else -1)
    if mode.endswith("full"):
        torch.cuda.empty_cache()
        STANDIN.limit(0, _at_most(name, amount))
    with _without(missing, harsh=mode.endswith("harsh")):
        before = STANDIN.states_set()
        try:
            given = GIVEN.get(mode, 10 * amount if mode.endswith("full") else amount)
            values, peak, run = _trained(name, amount=given, **MODES[mode])
        finally:
            STANDIN.limit(0, 4 << 30)
    return {
        "equal": all(map(torch.equal, values, expected)),
        "peak over budget": peak / amount,
        "reserved over budget": torch.cuda.max_memory_reserved() / amount,
        "states set": STANDIN.states_set() - before - states_set,
        "evictions": run.evictions,
        "recomputations": run.recomputations,
        "rescues": run._driver.backoff.times,
        "swapped": getattr(run.report().swapped, "out", 0),
        "places": run._driver.backoff.for_places,
        "rescues by the sum": run._driver.backoff.by_sum,
        "again": sorted(set(run._driver.core.recomputed_ops(run._driver.handle))),
        "kept": sorted({each.operator for each in run._driver.kept}),
        "reported": [
            each for each in run.report().advice if "The device ran out of memory" in each
        ],
    }


def main() -> None:
    found: dict[str, Any] = {}
    for question in sys.argv[2:]:
        try:
            found[question] = answer(question)
        except Exception as error:
            found[question] = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    # Exit without finalizing. Autograd's device thread may still free a graph task, for which it
    # needs the GIL, and PyTorch aborts the process if the interpreter is finalizing.
    os._exit(0)


if __name__ == "__main__":
    main()
