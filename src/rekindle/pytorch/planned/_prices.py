"""Measure operators on the device: time, bytes of results and workspace, and which are views.

A signature is an operator with the shapes, strides and dtypes of its tensors and its other
arguments. Each signature runs a few times on real tensors. In a training step an operator reads
some tensors from the processor's caches and others from memory. So its cost is the mean of two
times. One is the time of the fastest run with warm caches. The other is the time of the fastest run
after the caches were filled with other data. The same runs show which results are views: a view
shares the storage of an argument. Schemas do not always tell.

The measurements are kept in `rekindle._cache.cache_folder`, in one file per device and version of
torch. On a busy machine even the fastest run may be slow. So each of the first few processes
measures again, and the least cost counts. Within a process the cost of a signature never changes.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rekindle import _clock
from rekindle._cache import cache_folder, store
from rekindle._errors import RekindleError
from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.devices import accelerator, is_accelerator, is_out_of_memory
from rekindle.pytorch.operators import kernels_in_words
from rekindle.pytorch.planned._segments import Segment

#: numbers of runs to time with warm processor caches, and as many with cold ones: at least
#: `FEWEST_RUNS`; normally `ENOUGH_RUNS`; up to `MOST_RUNS` if the times disagree (`AGREE`)
FEWEST_RUNS, ENOUGH_RUNS, MOST_RUNS = 2, 6, 24
AGREE = 1.25  #: two measured times agree if the larger is at most this many times the smaller
ENOUGH_NS = 50_000_000  #: time (ns) after which an operator is not timed again
ENOUGH_PROCESSES = 3  #: after so many processes have measured a cost, it is not measured again
#: bytes written before a run with cold caches: about the size of a last-level cache
CACHE_BYTES = 40 << 20
#: if the inputs take fewer bytes, caches do not matter, so they are not filled before a run
SMALL_BYTES = 1 << 16
UNPRICED_BYTES_PER_NS = 4  #: bandwidth assumed for an operator that cannot run on made-up tensors

Report = Callable[[str], None]


@final
@dataclass(frozen=True, slots=True)
class Result:
    """One tensor that an operator returns.

    Attributes:
        nbytes: Bytes of the tensor's storage.
        alias: If the tensor is a view, the position of its base among the tensor arguments; else
            -1.
        stride: Strides of the tensor.
    """

    nbytes: Bytes
    alias: int = -1
    stride: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Price:
    """The measurements of an operator for one signature (shapes, strides, dtypes, other arguments).

    Attributes:
        cost: Time of a call of the operator (ns).
        results: The tensors that the operator returns, in order.
        workspace: Bytes that the operator uses only while it runs.
        processes: Number of processes that measured this operator.
    """

    cost: Nanoseconds
    results: tuple[Result, ...]
    workspace: Bytes = 0
    processes: int = 1

    @property
    def is_final(self) -> bool:
        """True if no other process needs to measure this operator again."""
        return self.processes >= ENOUGH_PROCESSES or not self.cost

    def after(self, earlier: Price | None) -> Price:
        """Combine this price with that of an earlier process: least cost, largest workspace."""
        if earlier is None:
            return self
        return replace(
            self,
            cost=min(self.cost, earlier.cost),
            workspace=max(self.workspace, earlier.workspace),
            processes=max(self.processes, earlier.processes + 1),
        )


@final
class Prices:
    """The measurements of operators on each device, kept in files.

    Attributes:
        folder: The folder with the files; None keeps measurements in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._known: dict[str, dict[str, Price]] = {}
        self._stored: dict[str, dict[str, Price]] = {}

    @staticmethod
    def of_user() -> Prices:
        """Return the measurements that are kept in the user's cache folder.

        All plans of a process share one object, so that the cost of an operator does not change.
        """
        return _of_folder(cache_folder())

    def of(self, nodes: list[fx.Node], report: Report | None = None) -> dict[fx.Node, Price]:
        """Return the price (measured cost, workspace and results) of each node.

        Operators whose price is not final are measured first.

        Args:
            nodes: Operator calls. Their arguments have fake tensors in `meta["val"]`.
            report: Called with a text each time the progress changes.
        """
        found: dict[fx.Node, Price] = {}
        missing: dict[tuple[str, str], list[fx.Node]] = {}
        for node in nodes:
            device, signature = signature_of(node)
            known = self._final(device, signature)
            if known is None:
                missing.setdefault((device, signature), []).append(node)
            else:
                found[node] = known
        try:
            for number, ((device, signature), alike) in enumerate(missing.items()):
                if report is not None:
                    report(f"measuring operators: {number} of {len(missing)} ({alike[0].target})")
                stored = self._stored[device].get(signature)
                try:
                    price = measure(alike[0]).after(stored)
                    self._known.setdefault(device, {})[signature] = price
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    # Do not store the estimate, because next time there may be enough memory to
                    # measure.
                    price = stored or _guess(alike[0])
                found.update(dict.fromkeys(alike, price))
        finally:
            for device in {device for device, _ in missing}:
                self._save(device)
        return found

    def _final(self, device: str, signature: str) -> Price | None:
        """Return this process's price of a signature, or None if it must be measured."""
        if device not in self._stored:
            self._stored[device] = self._load(device)
        known = self._known.get(device, {}).get(signature)
        if known is None:
            stored = self._stored[device].get(signature)
            known = stored if stored is not None and stored.is_final else None
        return known

    def _path(self, device: str) -> Path:
        assert self.folder is not None
        name = f"prices-{device}-torch{torch.__version__}-least"
        return self.folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.json"

    def _load(self, device: str) -> dict[str, Price]:
        if self.folder is None:
            return {}
        with suppress(OSError, ValueError, TypeError, KeyError):  # ignore a damaged file
            stored = json.loads(self._path(device).read_text(encoding="utf-8"))
            return {
                signature: Price(
                    int(cost),
                    tuple(
                        Result(int(n), int(alias), tuple(stride)) for n, alias, stride in results
                    ),
                    int(workspace),
                    int(processes),
                )
                for signature, (cost, results, workspace, processes) in stored.items()
            }
        return {}

    def _save(self, device: str) -> None:
        """Write the measurements for `device` to its file, and keep those of other processes in it.

        The file keeps the least cost, which may be less than the cost that this process uses.
        """
        known = self._known.get(device)
        if self.folder is None or not known:
            return
        latest = self._load(device)
        for signature, price in known.items():
            other = latest.get(signature, price)
            latest[signature] = replace(
                price,
                cost=min(price.cost, other.cost),
                processes=max(price.processes, other.processes),
            )
        stored = {
            signature: (
                price.cost,
                [(each.nbytes, each.alias, each.stride) for each in price.results],
                price.workspace,
                price.processes,
            )
            for signature, price in latest.items()
        }
        store(self._path(device), json.dumps(stored))


@cache
def _of_folder(folder: Path | None) -> Prices:
    return Prices(folder)


def signature_of(node: fx.Node) -> tuple[str, str]:
    """Return the name of the device that runs `node`, and a text for the node's signature.

    Two nodes have equal texts if they call the same operator with equal arguments. Tensors count as
    equal if they have the same shape, strides and dtype.
    """
    devices: list[torch.device] = []

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            value = value.meta["val"]
        if isinstance(value, Tensor):
            devices.append(value.device)
            shape, stride = tuple(value.shape), tuple(value.stride())
            return f"{str(value.dtype)[6:]}{list(shape)}{list(stride)}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(text(item) for item in value)}]"
        return repr(value)

    arguments = [text(value) for value in node.args]
    arguments += [f"{name}={text(value)}" for name, value in node.kwargs.items()]
    text(node.meta.get("val"))  # a call without tensor arguments runs on the device of its result
    device = devices[0] if devices else torch.device("cpu")
    where = f"{_name_of(device)}-{torch.get_num_threads()}" if device.type == "cpu" else ""
    return where or _name_of(device), f"{node.target}({', '.join(arguments)})"


def _name_of(device: torch.device) -> str:
    if is_accelerator(device):
        return f"{accelerator.name_of(device)}-{kernels_in_words()}"
    return f"{device.type}-{platform.machine()}-{platform.processor()}"


def measure(node: fx.Node) -> Price:
    """Measure the price of the operator of `node` on real tensors with made-up values.

    States of random number generators are restored afterwards. If the operator cannot run on
    made-up values, its price is estimated.

    Raises:
        RuntimeError: There is no memory for the made-up tensors (the allocator's own error).
    """
    if not isinstance(node.target, torch._ops.OpOverload | Segment):
        return _guess(node)
    with _disable_current_modes(), torch.no_grad(), _undisturbed_generators():
        try:
            return _run(node)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, RekindleError):
                raise
            # The operator does not accept the made-up values, such as a singular matrix.
            return _guess(node)


def _run(node: fx.Node) -> Price:
    args, kwargs = pytree.tree_map(_real, (_values(node.args), _values(node.kwargs)))
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    homes = {leaf.untyped_storage()._cdata: position for position, leaf in enumerate(given)}
    device = next((leaf.device for leaf in given), torch.device("cpu"))
    made = _call(node, args, kwargs)
    results = _results_of(node, made, homes)
    if isinstance(node.target, Segment):
        node.target.compare(args, made)
    elif results and all(result.alias >= 0 for result in results):
        return Price(0, results)  # the operator returns only views, which cost nothing
    del made
    within = _most_at_once(lambda: _call(node, args, kwargs), device)
    own = sum(result.nbytes for result in results if result.alias < 0)
    warm: list[Nanoseconds] = []
    cold: list[Nanoseconds] = []
    is_small = sum(leaf.untyped_storage().nbytes() for leaf in given) < SMALL_BYTES
    something_else = torch.zeros(0 if is_small else CACHE_BYTES, dtype=torch.uint8, device=device)
    until = _clock.now() + ENOUGH_NS
    while len(cold) < FEWEST_RUNS or (
        _clock.now() < until
        and (len(cold) < ENOUGH_RUNS or (len(cold) < MOST_RUNS and not _agree(warm, cold)))
    ):
        warm.append(_time(node, args, kwargs, device))
        something_else.add_(1)
        cold.append(_time(node, args, kwargs, device))
    return Price((min(warm) + min(cold)) // 2, results, max(0, within - own))


def _agree(*kinds: list[Nanoseconds]) -> bool:
    """Return True if the two least times in each list agree, so no other load disturbed them."""
    return all(second <= AGREE * least for least, second, *_ in map(sorted, kinds))


def _results_of(node: fx.Node, returned: Any, homes: dict[int, int]) -> tuple[Result, ...]:
    """Describe the tensors that an operator call returned.

    Some kernels return None in place of a tensor, for example the backward of a norm whose input
    needs no gradient. Such a result has 0 bytes.

    Args:
        node: The node of the call. Its fake results tell how many tensors the schema promises.
        returned: The value that the operator returned.
        homes: Address of each tensor argument's storage -> position of this argument.
    """
    results: list[Result] = []
    leaves = pytree.tree_leaves(returned)
    for fake, leaf in zip(pytree.tree_leaves(node.meta.get("val")), leaves, strict=True):
        if isinstance(leaf, Tensor):
            home = leaf.untyped_storage()
            alias = homes.get(home._cdata, -1)
            results.append(Result(home.nbytes(), alias, tuple(leaf.stride())))
        elif isinstance(fake, Tensor):
            results.append(Result(0, -1, tuple(fake.stride())))
    return tuple(results)


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Inside the block, keep PyTorch's profiler from printing messages at each start and stop.

    If the user has set `KINETO_LOG_LEVEL`, do not change it.
    """
    asked = "KINETO_LOG_LEVEL" in os.environ
    # Kineto, PyTorch's profiler library, reads this variable when the profiler is first used
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if not asked:
            del os.environ["KINETO_LOG_LEVEL"]


def _most_at_once(call: Callable[[], object], device: torch.device) -> Bytes:
    """Return the most bytes that `call` has allocated at one time: results and workspace.

    On an accelerator, return the sum of all allocations instead, which is at least the peak.
    """
    if is_accelerator(device):
        before = accelerator.allocator_figures(device)["allocated_bytes.all.allocated"]
        call()
        return accelerator.allocator_figures(device)["allocated_bytes.all.allocated"] - before
    profiled = torch._C._autograd._profiler_enabled()  # type: ignore[attr-defined]
    if profiled:  # the user's profiler is running, and only one can run at a time
        call()
        return 0
    # Use the profiler's memory events, because they come from the allocator itself. Other hooks do
    # not see allocations by compiled code.
    with (
        _quiet_profiler(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed,
    ):
        call()
    assert observed.profiler is not None
    found = observed.profiler.kineto_results
    events = [event for event in found.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    events.sort(key=lambda event: event.start_ns())
    sizes = (event.nbytes() for event in events)  # type: ignore[attr-defined]
    return max(accumulate(sizes), default=0)


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _time(node: fx.Node, args: Any, kwargs: Any, device: torch.device) -> Nanoseconds:
    if is_accelerator(device):
        start, end = accelerator.event(), accelerator.event()
        start.record()
        _call(node, args, kwargs)
        end.record()
        end.synchronize()
        return _clock.scaled(int(start.elapsed_time(end) * 1e6))
    # Use the clock of this thread. It does not count time while other processes occupy the core,
    # nor time while this thread waits for the operator's other threads.
    began = _clock.thread_now()
    _call(node, args, kwargs)
    return _clock.thread_now() - began


def _values(arguments: Any) -> Any:
    return map_arg(arguments, lambda node: node.meta["val"])


def _real(value: Any) -> Any:
    """Return a real tensor shaped like `value`: random in (0, 1), or zeros for integers."""
    if not isinstance(value, Tensor):
        return value
    reach = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    length = reach if value.numel() else 0
    flat = torch.zeros(length, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        flat.copy_(torch.rand(length, device=value.device))
    return flat.as_strided(tuple(value.shape), value.stride())


def _guess(node: fx.Node) -> Price:
    """Estimate the price of an operator that cannot be measured, from the bytes of its tensors."""
    leaves = pytree.tree_leaves((_values(node.args), _values(node.kwargs)))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    homes = {leaf.untyped_storage()._cdata: position for position, leaf in enumerate(given)}
    results = _results_of(node, node.meta.get("val"), homes)
    moved = sum(leaf.untyped_storage().nbytes() for leaf in given)
    moved += sum(result.nbytes for result in results)
    return Price(1_000 + moved // UNPRICED_BYTES_PER_NS, results)


@contextmanager
def _undisturbed_generators() -> Iterator[None]:
    with torch.random.fork_rng(range(accelerator.count()) if accelerator.in_use() else []):
        yield
