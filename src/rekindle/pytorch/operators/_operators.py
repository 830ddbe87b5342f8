"""What the runtime must know about an operator, learned once for each overload.

The schema says most of it. Where it is silent or wrong, the tables below say so, with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch._ops import HigherOrderOperator, OpOverload

from rekindle._errors import Unsupported
from rekindle._types import Bytes
from rekindle.pytorch.operators._doubtful import Doubt, doubt_of, may_differ
from rekindle.pytorch.operators._random import Drawn, drawn_from, generator_of
from rekindle.pytorch.tensors import EXOTIC, UNWRITTEN, ZEROED

#: Write the running statistics although the schema denies it (rule R6). Positions of running_mean
#: and running_var, and of the flag that says whether they are written.
HIDDEN_STATISTICS: dict[str, tuple[int, int, int]] = {
    "aten::native_batch_norm": (3, 4, 5),
    "aten::cudnn_batch_norm": (3, 4, 5),
    "aten::miopen_batch_norm": (3, 4, 5),
    "aten::instance_norm": (3, 4, 5),
    "aten::_native_batch_norm_legit": (3, 4, 5),
}
#: The same, but they always write, and their outputs do not depend on what was there before.
ALWAYS_WRITTEN_STATISTICS: dict[str, tuple[int, int]] = {
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
    "aten::_batch_norm_with_update": (3, 4),
}

#: Decide something: their integer results are kept, never computed again (rule R8).
ROUTING = {
    "aten::argmax",
    "aten::argmin",
    "aten::argsort",
    "aten::bincount",
    "aten::bucketize",
    "aten::kthvalue",
    "aten::median",
    "aten::mode",
    "aten::multinomial",
    "aten::nonzero",
    "aten::nonzero_static",
    "aten::randperm",
    "aten::searchsorted",
    "aten::sort",
    "aten::topk",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
#: Read an index or a mask whose *values* decide the shape of the result: those are kept as well.
INDEXING = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
    "aten::masked_select",
    "aten::masked_scatter",
    "aten::masked_scatter_",
    "aten::repeat_interleave",
}

#: Make memory without content (rule R4): who reads it first must have had it filled elsewhere.
EMPTY = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::new_empty",
    "aten::new_empty_strided",
}
#: Make memory of nothing but zeros, which kernels outside the dispatcher like to accumulate into.
ZEROS = {"aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::zero_"}

#: Read no element and make no memory. Autograd asks them where an error would end the process.
QUERIES = {
    "aten::_dimI",
    "aten::_dimV",
    "aten::_nested_tensor_size",
    "aten::_nested_tensor_storage_offsets",
    "aten::_nested_tensor_strides",
    "aten::_nnz",
    "aten::dense_dim",
    "aten::is_coalesced",
    "aten::q_per_channel_axis",
    "aten::q_scale",
    "aten::q_zero_point",
    "aten::qscheme",
    "aten::sparse_dim",
}

#: Return aliases that pass for new tensors: what is written to one, no version counter but its own
#: notices.
SEPARATING = {"aten::unsafe_chunk", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}
#: Makes a tensor that claims memory and has none.
WITHOUT_MEMORY = "aten::_efficientzerotensor"

#: Write the whole of their first argument without reading it.
OVERWRITING = {
    "aten::bernoulli_",
    "aten::cauchy_",
    "aten::copy_",
    "aten::exponential_",
    "aten::fill_",
    "aten::geometric_",
    "aten::log_normal_",
    "aten::normal_",
    "aten::random_",
    "aten::uniform_",
    "aten::zero_",
}

#: Choose a kernel by whether an argument requires a gradient, so replay must look the same.
SEES_REQUIRES_GRAD = {"aten::convolution", "aten::_convolution", "aten::linear"}

#: Their kernels call others on lazy conjugates. PyTorch excludes the key that makes those in memory
#: while a dispatch mode is active, and `linalg.pinv` of a complex matrix is none of it then.
CONJUGATING = {"aten::linalg_pinv", "aten::linalg_lstsq"}

#: Collectives that write their first argument, although the schema denies it and no version counter
#: tells. What else is named like one is refused.
COLLECTIVES_IN_PLACE = {
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
    "c10d::allgather_",
    "c10d::allgather_coalesced_",
    "c10d::allgather_into_tensor_coalesced_",
    "c10d::allreduce_",
    "c10d::allreduce_coalesced_",
    "c10d::alltoall_",
    "c10d::alltoall_base_",
    "c10d::broadcast_",
    "c10d::gather_",
    "c10d::gather_into_tensor_",  # from torch 2.14 on
    "c10d::recv_",
    "c10d::recv_any_source_",
    "c10d::reduce_",
    "c10d::reduce_scatter_",
    "c10d::reduce_scatter_tensor_coalesced_",
    "c10d::scatter_",
}
#: Write no tensor.
COLLECTIVES_WITHOUT_RESULT = {"c10d::monitored_barrier_"}

#: In the names of operators that sum up products, whose precision PyTorch has switches for.
SUMS_OF_PRODUCTS = (
    "addr", "attention", "bilinear", "cdist", "chol", "conv", "dot", "einsum", "ger", "gru",
    "inner", "inverse", "linalg", "linear", "lstm", "lu_", "matmul", "mkldnn", "mm", "mv",
    "outer", "pdist", "qr", "rnn", "solve", "svd", "tensordot", "vdot",
)  # fmt: skip

#: In the names of operators that on a CPU take more inside themselves than they make.
ROOMY_ON_HOST = (
    "attention", "bernoulli", "conv", "dropout", "gru", "linalg", "lstm", "mean", "norm_backward",
    "rms_norm", "rnn",
)  # fmt: skip

#: Never run again: they talk to other processes or to the outside.
EFFECTS = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem", "debugprims")

#: Higher-order operators that write nothing but their results, so that these can be kept (R12).
FUNCTIONAL = {
    "associative_scan",
    "cond",
    "flex_attention",
    "flex_attention_backward",
    "map_impl",
    "scan",
    "while_loop",
    "while_loop_stack_output",
}

#: Draw random numbers although the tag `nondeterministic_seeded` is missing. They also write them
#: into their second argument, without a step of its version counter.
UNTAGGED_RANDOM = {"aten::rrelu_with_noise", "aten::rrelu_with_noise_"}


#: Sums that stay in memory of the size of what was summed up: losses, overlapping patches.
REDUCED_IN_PLACE = {
    "aten::binary_cross_entropy",
    "aten::col2im",
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::soft_margin_loss",
}


@final
class Operator:
    """What is fixed for one overload."""

    __slots__ = (
        "content",
        "counted_first",
        "differentiated",
        "doubt",
        "dynamic",
        "foreign",
        "func",
        "indexing",
        "marks",
        "name",
        "opaque",
        "overload",
        "overwriting",
        "precise",
        "predicting",
        "random",
        "reduced_in_place",
        "resizes",
        "results",
        "returns_tensors",
        "returns_written",
        "routing",
        "scaled",
        "sees_requires_grad",
        "separating",
        "starts_anew",
        "statistics",
        "unannounced",
        "view",
        "writes",
        "written",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.overload = func  # lives as long as this, so that its identity is no other's
        self.name: str = schema.name
        each_in_place = self.name.startswith("aten::_foreach_") and self.name.endswith("_")
        plain = getattr(func, "_op", func)  # without the layer of Python around it
        self.func: Callable[..., Any] = _counted(plain) if each_in_place else plain
        if self.name in CONJUGATING:
            self.func = _with_lazy_conjugates(plain)
        #: Not PyTorch's own: maybe code that waits for other threads.
        self.foreign = not self.name.startswith("aten::")
        self.predicting = self.func  #: on meta tensors, for the sizes of the results
        aliased = [r.alias_info for r in schema.returns if r.alias_info is not None]
        arguments = list(enumerate(schema.arguments))
        moves = self.name.startswith("aten::set_")
        #: Positions and names of the arguments that are written.
        self.written = tuple(
            (position, argument.name)
            for position, argument in arguments
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and not moves  # the tensor gets other memory, nothing is written
        )
        if self.name in COLLECTIVES_IN_PLACE:
            self.written = ((0, schema.arguments[0].name),)
        elif self.name.startswith("c10d::") and self.name.endswith("_"):
            _check_collective(self.name, bool(self.written))
        only_aliases = bool(aliased) and len(aliased) == len(schema.returns)
        #: Returns views only, or marks a place for the profiler: no memory, no work. (What is
        #: composed of others, as `ravel`, comes here whole in inference mode, and may copy.)
        views = only_aliases and not self.written and not _is_composed(func)
        self.marks = self.name.startswith("profiler::")
        self.view = views or self.marks
        #: Returns tensors: else it makes none.
        self.returns_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        #: Returns what it writes, and nothing beside.
        self.returns_written = all(r.alias_info and r.alias_info.is_write for r in schema.returns)
        tags = func.tags
        self.random = torch.Tag.nondeterministic_seeded in tags or self.name in UNTAGGED_RANDOM
        self.doubt = doubt_of(schema)
        #: The sizes of the results depend on the content of the arguments.
        self.dynamic = torch.Tag.dynamic_output_shape in tags
        self.results = len(schema.returns)
        self.counted_first = self.name in COUNTED_FIRST
        #: Decides its sizes by a list of numbers that are no integers.
        self.scaled = any(argument.name == "scale_factors" for _, argument in arguments)
        self.reduced_in_place = self.name in REDUCED_IN_PLACE
        self.routing = self.name in ROUTING
        self.indexing = self.name in INDEXING
        #: What the content of a result is until somebody writes to it; nothing special: 0.
        self.content = _content(self.name)
        self.overwriting = self.name in OVERWRITING
        self.separating = self.name in SEPARATING
        self.precise = _is_precise(self.name)
        self.sees_requires_grad = self.name in SEES_REQUIRES_GRAD
        self.statistics = self.name in HIDDEN_STATISTICS or self.name in ALWAYS_WRITTEN_STATISTICS
        #: May change the size of a storage: set_, resize_, and whatever writes to `out`.
        self.resizes = self.name.startswith(("aten::resize", "aten::set_")) or any(
            argument.kwarg_only for position, argument in arguments if self._writes(position)
        )
        #: No version counter tells of what it writes.
        self.unannounced = self.statistics or self.name in COLLECTIVES_IN_PLACE
        self.writes = bool(self.written) or self.statistics
        effect = self.name.split("::")[0] in EFFECTS
        #: Out of memory amid a list, or with others waiting, it cannot be called once more. One
        #: kernel can: its memory is there before it begins.
        self.starts_anew = not effect and not any(
            argument.type.kind() == "ListType"
            for position, argument in arguments
            if self._writes(position)
        )
        self.opaque = effect or self.resizes or self.name == WITHOUT_MEMORY
        #: Has a backward pass of its own: what it is made of runs with grad mode off.
        self.differentiated = (
            self.foreign and not effect and not self.writes and _has_autograd(func)
        )

    def _writes(self, position: int) -> bool:
        return any(position == written for written, _ in self.written)

    def may_differ(self, args: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether such a call may give other bits when it runs again, so that it is kept."""
        return self.doubt is not Doubt.NONE and may_differ(
            self.doubt, self.overload._schema, args, tensors
        )

    def drawn(
        self, tensors: Sequence[torch.Tensor], extras: Sequence[Any], kwargs: dict[str, Any]
    ) -> Drawn:
        """What a random operator is about to draw from."""
        return drawn_from([generator_of(tensors, extras, kwargs.get("device"))])

    def written_statistics(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The positions of running statistics that this call writes behind the schema's back."""
        if self.name in ALWAYS_WRITTEN_STATISTICS:
            return ALWAYS_WRITTEN_STATISTICS[self.name]
        mean, variance, training = HIDDEN_STATISTICS[self.name]
        return (mean, variance) if args[training] else ()


def _is_precise(name: str) -> bool:
    """Whether PyTorch's switches of precision may mean it: a sum of products, or who knows what."""
    return _is_one_of(SUMS_OF_PRODUCTS, name)


def is_roomy_on_host(name: str) -> bool:
    """Whether such an operator may take more inside itself on a CPU than it makes."""
    return _is_one_of(ROOMY_ON_HOST, name)


def _is_one_of(parts: tuple[str, ...], name: str) -> bool:
    """Whether one of `parts` is in its name, or it is not torch's own: who knows what it does?"""
    namespace, _, rest = name.partition("::")
    return namespace != "aten" or any(part in rest for part in parts)


def _check_collective(name: str, tells: bool) -> None:
    """Refuses one that may write nobody knows what (R11)."""
    if not tells and name not in COLLECTIVES_WITHOUT_RESULT:
        raise unseen_collective(name)


def unseen_collective(name: str) -> Unsupported:
    """A collective may write nobody knows what."""
    return Unsupported(
        f"the collective {name} inside rekindle.budget(...): its name says that it writes its "
        "arguments, and nothing says which. Leave the budget for it, or use its functional "
        "form, from torch.distributed._functional_collectives"
    )


def _is_composed(func: Any) -> bool:
    composed = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]
    return isinstance(func, OpOverload) and func.has_kernel_for_dispatch_key(composed)


def _has_autograd(func: Any) -> bool:
    keys: Any = torch._C.DispatchKey
    if not isinstance(func, OpOverload) or not torch._C._dispatch_has_kernel(func.name()):
        return False  # as `prim::device`, what a subclass is asked for: the dispatcher has it not
    return any(func.has_kernel_for_dispatch_key(key) for key in (keys.Autograd, keys.AutogradCPU))


def _content(name: str) -> int:
    if name in EMPTY:
        return UNWRITTEN
    if name in ZEROS:
        return ZEROED
    return EXOTIC if name == WITHOUT_MEMORY else 0


def _counted(func: Any) -> Callable[..., Any]:
    """`func`, which writes all of its first argument, and a step of their version counters.

    Without a mode the kernel for one tensor after the other takes that step; below one it does not.
    """

    def call(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        counters = [(each, each._version) for each in tensors if not each.is_inference()]
        result = func(tensors, *args, **kwargs)
        late = [each for each, version in counters if each._version == version]
        torch._C._increment_version(late)  # type: ignore[attr-defined]
        return result

    return call


def _with_lazy_conjugates(func: Any) -> Callable[..., Any]:
    """`func`, as it runs where no dispatch mode is active."""
    keys = torch._C.DispatchKey
    lazy = torch._C.DispatchKeySet(keys.Conjugate) | torch._C.DispatchKeySet(keys.Negative)

    def call(*args: Any, **kwargs: Any) -> Any:
        included = torch._C._dispatch_tls_local_include_set()
        excluded = torch._C._dispatch_tls_local_exclude_set()
        with torch._C._ForceDispatchKeyGuard(included, excluded - lazy):
            return func(*args, **kwargs)

    return call


COUNT_BYTES = 8  #: what it takes to count, in `bytes_of_dynamic`
#: Their results may be larger than any bound that the sizes of their arguments give.
COUNTED_FIRST = {
    "aten::bincount",
    "aten::index",
    "aten::masked_select",
    "aten::repeat_interleave",
}


def bytes_of_dynamic(operator: Operator, args: tuple[Any, ...]) -> Bytes:
    """The exact size of a result whose size depends on values, where that is quick to know.

    Elsewhere no limit is known: the bound from the arguments stands.
    """
    name, tensor = operator.name, args[0] if args else None
    if tensor is None:
        return sys.maxsize
    if name == "aten::nonzero":
        return 8 * tensor.dim() * int(torch.count_nonzero(tensor))
    if name == "aten::masked_select":
        mask = args[1]
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        return tensor.element_size() * int(torch.count_nonzero(mask.expand(shape)))
    if name == "aten::repeat_interleave" and len(args) == 1:
        return tensor.element_size() * int(tensor.sum())
    if name == "aten::bincount" and tensor.numel():
        least = args[2] if len(args) > 2 else 0
        return 8 * max(int(tensor.max()) + 1, least)
    if name == "aten::_unique2":  # at most: all different
        return tensor.numel() * (tensor.element_size() + 8 * sum(map(bool, args[2:])))
    if name == "aten::index":
        return _bytes_of_index(tensor, args[1])
    return sys.maxsize


def _bytes_of_index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Bytes:
    """A mask stands for as many indices as it has dimensions."""
    if all(each is None or each.dtype not in (torch.bool, torch.uint8) for each in indices):
        return sys.maxsize  # and a meta kernel knows
    shapes: list[Any] = []
    for each in indices:
        if each is None:
            shapes.append(None)
        elif each.dtype in (torch.bool, torch.uint8):
            count = int(torch.count_nonzero(each))
            places = torch.empty(count, dtype=torch.int64, device="meta")
            shapes += [places] * each.dim()
        else:
            shapes.append(torch.empty(each.shape, dtype=torch.int64, device="meta"))
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.ops.aten.index.Tensor(plain, shapes).untyped_storage().nbytes()


def check_higher_order(higher: HigherOrderOperator) -> None:
    """Refuses what may write its arguments unseen (R11)."""
    if higher.name() not in FUNCTIONAL:
        raise Unsupported(
            f"the higher-order operator {higher.name()} inside rekindle.budget(...): what it does "
            "cannot be seen, and it may write its arguments. Leave the budget for it, or write it "
            "in plain operators"
        )


_known: dict[int, Operator] = {}


def operator(func: Any) -> Operator:
    """The facts of `func`, an `OpOverload`."""
    found = _known.get(id(func))  # its own hash is written in Python
    return _known.setdefault(id(func), Operator(func)) if found is None else found
