"""Predict the memory of an optimizer's step by running the step on shapes.

The optimizer's own code runs on stand-ins for parameters, gradients and state. Stand-ins have sizes
but no memory. Only tensors of one element, such as the step count, are computed, on copies of the
originals. Each operator's results and workspace are counted as the runtime counts them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from rekindle._types import Bytes
from rekindle.pytorch.devices import is_accelerator, rounded
from rekindle.pytorch.operators import (
    STRIDED,
    Invocation,
    Place,
    operator,
    signature_of,
    tensors_in,
    written_by,
)
from rekindle.pytorch.tensors import Geometry, geometry_of

MOST_COPIES: Final = 12
"""Most tensors of a parameter's size that a step of an element-wise optimizer has at once."""
MOST_SMALL: Final = 32 << 10
"""Most bytes for a parameter's tensors of one element, and to round up the sizes of all."""


def bytes_of_step(optimizer: torch.optim.Optimizer, device: torch.device) -> Bytes:
    """Return the most bytes that `optimizer.step()` will need in addition to those in use now.

    Args:
        optimizer: One of PyTorch's own optimizers with dense gradients, whose step runs no code of
            the user.
        device: The device whose bytes are counted.
    """
    return _run(optimizer, device, optimizer.param_groups).peak


def bytes_of_largest(optimizer: torch.optim.Optimizer, device: torch.device) -> Bytes:
    """Return the most bytes that the step has in use for the parameter with the most elements.

    Unlike `bytes_of_step`, this includes the parameter, its gradient and its state.

    Args:
        optimizer: As for `bytes_of_step`.
        device: The device whose bytes are counted.
    """
    stepped = [
        (parameter.numel(), group | {"params": [parameter]})
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    if not stepped:
        return 0
    _, largest = max(stepped, key=itemgetter(0))
    [parameter] = largest["params"]
    kept = tensors_in([parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()])
    dry_run = _run(optimizer, device, [largest])
    return dry_run.peak + sum(dry_run.bytes_of(each) for each in kept)


def _run(
    optimizer: torch.optim.Optimizer, device: torch.device, groups: list[dict[str, Any]]
) -> _DryRun:
    """Return a dry run of `optimizer.step()` on the parameter groups `groups`."""
    step: Any = type(optimizer).step
    with _disable_current_modes(), torch.no_grad():
        dry_run = _DryRun(device)
        shadow = _shadow_of(optimizer, groups, dry_run)
        with dry_run:
            # Call the method of the optimizer without its profiler range and step hooks.
            step.__wrapped__(shadow)
    return dry_run


def most_bytes_of_step(optimizer: torch.optim.Optimizer) -> Bytes:
    """Return an upper bound of the bytes that `optimizer.step()` needs, without a dry run.

    The step makes a few tensors of each parameter's size, as state or for a moment, and a few of
    one element.

    Args:
        optimizer: One of PyTorch's own optimizers that work element by element.
    """
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    nbytes = sum(each.numel() * max(4, each.element_size()) for each in parameters)
    return MOST_COPIES * nbytes + MOST_SMALL * len(parameters)


@final
class _StandIn(Tensor):
    """A tensor without memory that reports the device of the tensor that it replaces.

    Its attribute `shape_of` is a meta tensor with the same sizes and strides.
    """

    shape_of: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> _StandIn:
        size, stride, offset = meta.size(), meta.stride(), meta.storage_offset()
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, size, strides=stride, storage_offset=offset, dtype=meta.dtype, device=device
        )
        made.shape_of = meta
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} on a stand-in, outside of its dry run")


@final
class _DryRun(TorchDispatchMode):
    """A dispatch mode that runs operators on stand-ins (tensors without memory).

    It counts the memory that the same operators would need on real tensors.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._place: Place = (device, True) if is_accelerator(device) else None
        self.alive: Bytes = 0
        self.peak: Bytes = 0
        # storages of stand-ins that are alive, by address
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # results of earlier calls that are one new tensor: the geometry and the storage's bytes, by
        # key of the call's signature
        self._results: dict[Any, tuple[Geometry, Bytes]] = {}

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return a stand-in for a tensor that exists before the step.

        A tensor of one element is copied instead, because its value matters.
        """
        if tensor.numel() == 1:
            made = copy_of_number(tensor)
        else:
            storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
            made = _StandIn(geometry_of(tensor).of(storage), tensor.device)
        self._meet(made, 0)
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = operator(func)
        for tensor in tensors_in([*args, *kwargs.values()]):
            self._meet(tensor, self.bytes_of(tensor))
        stood_in = any(issubclass(kind, _StandIn) for kind in types or ())
        if stood_in and facts.name in ("aten::_local_scalar_dense", "aten::is_nonzero"):
            # A number that the step reads from a tensor, for example a norm, only scales updates.
            # No tensor's size depends on it, so return any number.
            return 1
        shapes = tuple(map(_shape_of, args))
        named = {name: _shape_of(arg) for name, arg in kwargs.items()}
        key = None
        if not facts.view:
            invocation = Invocation(facts, shapes, named)
            key = invocation.key
            needed = signature_of(facts, key, self._place).predict(invocation.extras)
            self.peak = max(self.peak, self.alive + needed)
        if not stood_in:
            result = func(*args, **kwargs)
        elif facts.writes and facts.returns_written:
            return _returned(func, list(written_by(facts, args, kwargs)))
        else:
            device = named.get("device") or next(each.device for each in tensors_in(list(args)))
            result = self._made(func, shapes, named, device, key)
        for tensor in tensors_in(result):
            self._meet(tensor, self.bytes_of(tensor))
        self.peak = max(self.peak, self.alive)
        return result

    def _made(
        self, func: Any, shapes: Any, named: dict[str, Any], device: torch.device, key: Any
    ) -> Any:
        """Run an operator on meta tensors, and return its results as stand-ins without memory.

        Meta kernels are slow, and an optimizer calls the same operators for each parameter. So an
        operator whose result is one new tensor runs once for each `key` of a signature.
        """
        if (known := self._results.get(key)) is not None:
            geometry, nbytes = known
            return _StandIn(geometry.of(torch.UntypedStorage(nbytes, device="meta")), device)
        metas, named = tree_map_only(Tensor, lambda each: each.to("meta"), (shapes, named))
        if named.get("device") is not None:
            named["device"] = "meta"
        result = func(*metas, **named)
        if key is not None and type(result) is Tensor and not _is_alias(result, metas, named):
            nbytes = result.untyped_storage().nbytes()
            self._results[key] = (geometry_of(result), nbytes)
        return tree_map_only(Tensor, lambda each: _StandIn(each, device), result)

    def bytes_of(self, tensor: Tensor) -> Bytes:
        """Return the bytes that the storage of the real tensor takes on the counted device.

        0 if the tensor is on another device.
        """
        on_it = tensor.layout is STRIDED and tensor.device.type == self._device.type
        return rounded(_home(tensor).nbytes(), self._device) if on_it else 0

    def _meet(self, tensor: Tensor, nbytes: Bytes) -> None:
        """Add `nbytes` to the memory in use if the storage of `tensor` is not counted yet.

        They are subtracted when the storage is freed.
        """
        if tensor.layout is not STRIDED:
            return
        home = _home(tensor)
        address = home._cdata
        known = self._known.get(address)
        if known is None or known() is None:
            self.alive += nbytes

            def free(died: weakref.ref[torch.UntypedStorage]) -> None:
                self.alive -= nbytes
                if self._known.get(address) is died:
                    del self._known[address]

            self._known[address] = weakref.ref(home, free)


def copy_of_number(tensor: Tensor) -> Tensor:
    """Copy a tensor of one element.

    `clone` fails if the tensor is evicted, because operators of the dry run do not pass through the
    native core, so nothing recomputes the tensor. `tolist` works, because Rekindle replaces this
    method by one that makes the tensor resident first.
    """
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return torch.tensor(tensor.tolist(), dtype=tensor.dtype, device=tensor.device)


def _home(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage that identifies `tensor`: for a stand-in, that of its meta tensor."""
    return (tensor.shape_of if type(tensor) is _StandIn else tensor).untyped_storage()


def _shape_of(arg: Any) -> Any:
    """Return an argument of an operator with meta tensors in place of stand-ins."""
    kind = type(arg)
    if kind is _StandIn:
        return arg.shape_of
    # faster than `tree_map`, which also looks into containers that operators do not get
    return kind(map(_shape_of, arg)) if kind is list or kind is tuple else arg


def _is_alias(result: Tensor, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True if `result` has the storage of an argument."""
    home = result.untyped_storage()._cdata
    given = tensors_in([*args, *kwargs.values()])
    return any(each.untyped_storage()._cdata == home for each in given)


def _returned(func: Any, written: list[Tensor]) -> Any:
    """Return the result of an operator that returns the tensors it writes."""
    returns = len(func._schema.returns)
    if not returns:
        return None
    return written[0] if returns == 1 else tuple(written)


def _shadow_of(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], dry_run: _DryRun
) -> Any:
    """Return a copy of `optimizer` with the parameter groups `groups`, on stand-ins."""
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(
        {
            name: dry_run.stand_in(value) if isinstance(value, Tensor) else value
            # `GradScaler` stores its tensors in attributes of the optimizer.
            for name, value in vars(optimizer).items()
        }
    )
    shadow.state = defaultdict(dict)
    shadow.param_groups = []
    for group in groups:
        parameters: list[Tensor] = []
        for parameter in group["params"]:
            stand_in = dry_run.stand_in(parameter)
            parameters.append(stand_in)
            if parameter.grad is not None:
                stand_in.grad = dry_run.stand_in(parameter.grad)
            if parameter in optimizer.state:
                state = optimizer.state[parameter]
                shadow.state[stand_in] = tree_map_only(Tensor, dry_run.stand_in, dict(state))
        settings = {name: value for name, value in group.items() if name != "params"}
        settings = tree_map_only(Tensor, dry_run.stand_in, settings)
        shadow.param_groups.append(settings | {"params": parameters} | chosen_foreach(group))
    return shadow


def chosen_foreach(group: Mapping[str, Any]) -> dict[str, bool]:
    """Return the setting `foreach` that `optimizer.step()` would choose for a parameter group.

    PyTorch chooses by the type of the parameters. Stand-ins have another type, so this function
    chooses from the original parameters. If the step chooses nothing, return an empty dict.
    """
    # The optimizers Adafactor and Muon have no such setting to choose.
    chooses = "foreach" in group and "differentiable" in group
    if not chooses or group["foreach"] is not None or group.get("fused") is not None:
        return {}
    _, foreach = _default_to_fused_or_foreach(group["params"], group["differentiable"])
    tensor_rate = isinstance(group.get("lr"), Tensor) and not group.get("capturable")
    return {"foreach": foreach and not tensor_rate}
