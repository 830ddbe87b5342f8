"""What the runtime must know about an operator, learned once for each overload.

The schema says most of it. Where it is silent or wrong, the tables below say so, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch._ops import HigherOrderOperator, OpOverload

from rekindle._errors import Unsupported
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

#: Their results may be larger than any bound that the sizes of their arguments give.
COUNTED_FIRST = {
    "aten::bincount",
    "aten::index",
    "aten::masked_select",
    "aten::repeat_interleave",
}


@final
class Operator:
    """What is fixed for one overload."""

    __slots__ = (
        "content",
        "name",
        "opaque",
        "overload",
        "predicting",
        "random",
        "reduced_in_place",
        "resizes",
        "results",
        "returns_tensors",
        "returns_written",
        "scaled",
        "sees_requires_grad",
        "statistics",
        "view",
        "writes",
        "written",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.overload = func  # lives as long as this, so that its identity is no other's
        self.name: str = schema.name
        #: What is called on meta tensors, for the sizes of the results: without the layer of Python
        #: around it.
        self.predicting: Callable[..., Any] = getattr(func, "_op", func)
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
        self.view = views or self.name.startswith("profiler::")
        #: Returns tensors: else it makes none.
        self.returns_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        #: Returns what it writes, and nothing beside.
        self.returns_written = all(r.alias_info and r.alias_info.is_write for r in schema.returns)
        tags = func.tags
        self.random = torch.Tag.nondeterministic_seeded in tags or self.name in UNTAGGED_RANDOM
        self.results = len(schema.returns)
        #: Decides its sizes by a list of numbers that are no integers.
        self.scaled = any(argument.name == "scale_factors" for _, argument in arguments)
        self.reduced_in_place = self.name in REDUCED_IN_PLACE
        #: What the content of a result is until somebody writes to it; nothing special: 0.
        self.content = _content(self.name)
        self.sees_requires_grad = self.name in SEES_REQUIRES_GRAD
        self.statistics = self.name in HIDDEN_STATISTICS or self.name in ALWAYS_WRITTEN_STATISTICS
        #: May change the size of a storage: set_, resize_, and whatever writes to `out`.
        self.resizes = self.name.startswith(("aten::resize", "aten::set_")) or any(
            argument.kwarg_only for position, argument in arguments if self._writes(position)
        )
        self.writes = bool(self.written) or self.statistics
        effect = self.name.split("::")[0] in EFFECTS
        self.opaque = effect or self.resizes or self.name == WITHOUT_MEMORY

    def _writes(self, position: int) -> bool:
        return any(position == written for written, _ in self.written)

    def written_statistics(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The positions of running statistics that this call writes behind the schema's back."""
        if self.name in ALWAYS_WRITTEN_STATISTICS:
            return ALWAYS_WRITTEN_STATISTICS[self.name]
        mean, variance, training = HIDDEN_STATISTICS[self.name]
        return (mean, variance) if args[training] else ()


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


def _content(name: str) -> int:
    if name in EMPTY:
        return UNWRITTEN
    if name in ZEROS:
        return ZEROED
    return EXOTIC if name == WITHOUT_MEMORY else 0


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
