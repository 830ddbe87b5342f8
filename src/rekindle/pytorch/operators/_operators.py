"""Properties of operators that the runtime needs, such as written arguments and randomness.

An operator's schema states most of the properties. The tables in this file list the operators whose
schema is incomplete or wrong. The native core gets the tables through `_traits`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch._ops import OpOverload

from rekindle._errors import Unsupported
from rekindle.pytorch.tensors import EXOTIC, UNWRITTEN, ZEROED

#: Operators that write running statistics although their schema does not say so (R6, hidden
#: writes). For each, the positions of the arguments running_mean and running_var, and of the flag
#: that enables the write.
HIDDEN_STATISTICS: dict[str, tuple[int, int, int]] = {
    "aten::native_batch_norm": (3, 4, 5),
    "aten::cudnn_batch_norm": (3, 4, 5),
    "aten::miopen_batch_norm": (3, 4, 5),
    "aten::instance_norm": (3, 4, 5),
    "aten::_native_batch_norm_legit": (3, 4, 5),
}
#: Operators that always write running statistics, and whose outputs do not depend on the old
#: statistics -> positions of these two arguments.
ALWAYS_WRITTEN_STATISTICS: dict[str, tuple[int, int]] = {
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
    "aten::_batch_norm_with_update": (3, 4),
}

#: Operators that make decisions (indices, counts). Their integer results are never evicted (R8,
#: routing), because recomputing them from slightly different inputs could change them.
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
#: Operators for which the contents of an index or a mask determine the shape of the result. This
#: index or mask is never evicted.
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

#: Operators that make uninitialized memory. If an operator reads such memory and no other operator
#: has written it, code outside the dispatcher must have written it. Then the memory is a source: it
#: cannot be recomputed (R4, sources).
EMPTY = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::new_empty",
    "aten::new_empty_strided",
}
#: Operators that make zeros. Kernels outside the dispatcher often accumulate into such memory.
ZEROS = {"aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::zero_"}

#: Operators that read no element and allocate nothing, so Rekindle evicts nothing for them.
#: Autograd calls them where an error would terminate the process.
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

#: The operator whose result reports a size in bytes, but has no memory.
WITHOUT_MEMORY = "aten::_efficientzerotensor"

#: Operators that overwrite their whole first argument without reading it.
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

#: Operators that choose another kernel if an argument requires a gradient. A recomputation must
#: pass an argument with the same `requires_grad`.
SEES_REQUIRES_GRAD = {"aten::convolution", "aten::_convolution", "aten::linear"}

#: Operators whose kernels call other operators on tensors with the conjugate bit. While a dispatch
#: mode is active, PyTorch excludes the dispatch key that resolves this bit. So `linalg.pinv` of
#: complex matrices would give wrong results.
CONJUGATING = {"aten::linalg_pinv", "aten::linalg_lstsq"}

#: Collectives that write their first argument, although the schema does not say so and no version
#: counter changes. Other collectives whose name ends with "_" are refused.
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
    "c10d::gather_into_tensor_",  # since torch 2.14
    "c10d::recv_",
    "c10d::recv_any_source_",
    "c10d::reduce_",
    "c10d::reduce_scatter_",
    "c10d::reduce_scatter_tensor_coalesced_",
    "c10d::scatter_",
}
#: Collectives whose name ends with "_", but that write no tensor.
COLLECTIVES_WITHOUT_RESULT = {"c10d::monitored_barrier_"}

#: Parts of the names of operators that sum products, whose precision depends on global settings.
SUMS_OF_PRODUCTS = (
    "addr", "attention", "bilinear", "cdist", "chol", "conv", "dot", "einsum", "ger", "gru",
    "inner", "inverse", "linalg", "linear", "lstm", "lu_", "matmul", "mkldnn", "mm", "mv",
    "outer", "pdist", "qr", "rnn", "solve", "svd", "tensordot", "vdot",
)  # fmt: skip

#: Parts of the names of operators whose workspace on a CPU may exceed their results.
ROOMY_ON_HOST = (
    "attention", "bernoulli", "conv", "dropout", "gru", "linalg", "lstm", "mean", "norm_backward",
    "rms_norm", "rnn",
)  # fmt: skip

#: Namespaces of operators that are never recomputed, because they communicate with other processes
#: or have other effects.
EFFECTS = (
    "c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem",
    "debugprims",
)  # fmt: skip
#: The other namespaces of PyTorch's own operators. An operator of any other namespace is recomputed
#: on trial only (R9, everything else runs once).
OWN = (
    "aten", "prims", "prim", "profiler", "inductor", "inductor_prims", "rngprims", "fsdp",
    "quantized", "_quantized", "quantized_decomposed", "quantization", "sparse", "mkl", "mkldnn",
    "mkldnn_prepacked", "onednn", "static_runtime", "export", "debug_mode_ops", "_dtensor",
    "_native", "streams",
)  # fmt: skip

#: Higher-order operators that write their arguments only by operators. Of any other one, Rekindle
#: assumes that it writes them unseen, and recomputes nothing that it makes.
FUNCTIONAL = {
    "associative_scan",
    "cond",
    "flex_attention",
    "flex_attention_backward",
    "map_impl",
    "scan",
    "switch",
    "while_loop",
    "while_loop_stack_output",
}

#: Random operators without the tag `nondeterministic_seeded`. They also write the random numbers
#: into their second argument, without changing its version counter.
UNTAGGED_RANDOM = {"aten::rrelu_with_noise", "aten::rrelu_with_noise_"}


#: Operators whose results, given floating-point numbers, have at most four times the bytes of the
#: tensor arguments. Those that work element by element are not listed: PyTorch tags them.
LIKE_ARGUMENTS = {
    "aten::_log_softmax",
    "aten::_log_softmax_backward_data",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_no_training",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_softmax",
    "aten::_softmax_backward_data",
    "aten::cat",
    "aten::clone",
    "aten::convolution_backward",
    "aten::mean",
    "aten::mse_loss",
    "aten::mse_loss_backward",
    "aten::native_batch_norm",
    "aten::native_batch_norm_backward",
    "aten::native_group_norm",
    "aten::native_group_norm_backward",
    "aten::native_layer_norm",
    "aten::native_layer_norm_backward",
    "aten::nll_loss_backward",
    "aten::nll_loss_forward",
    "aten::sum",
}

#: Operators that return a sum in a storage with room for all summands, such as losses.
REDUCED_IN_PLACE = {
    "aten::binary_cross_entropy",
    "aten::col2im",
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::soft_margin_loss",
}

#: Operators whose results may be larger than any bound that follows from argument sizes.
COUNTED_FIRST = {
    "aten::bincount",
    "aten::index",
    "aten::masked_select",
    "aten::repeat_interleave",
}


@final
class Operator:
    """The properties of one operator overload."""

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
        # Keep the overload alive, because the cache `_known` identifies it by its id, which could
        # be reused.
        self.overload = func
        self.name: str = schema.name
        #: The function that computes the sizes of results from meta tensors. It is the operator
        #: without PyTorch's slower Python wrapper.
        self.predicting: Callable[..., Any] = getattr(func, "_op", func)
        aliased = [r.alias_info for r in schema.returns if r.alias_info is not None]
        arguments = list(enumerate(schema.arguments))
        moves = self.name.startswith("aten::set_")
        #: Positions and names of the arguments that the operator writes.
        self.written = tuple(
            (position, argument.name)
            for position, argument in arguments
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and not moves  # `set_` gives the tensor another storage, and writes no element
        )
        if self.name in COLLECTIVES_IN_PLACE:
            self.written = ((0, schema.arguments[0].name),)
        elif self.name.startswith("c10d::") and self.name.endswith("_"):
            _check_collective(self.name, bool(self.written))
        only_aliases = bool(aliased) and len(aliased) == len(schema.returns)
        #: True if the operator computes and allocates nothing: it only returns views, or only marks
        #: a range for the profiler. False for a composite operator such as `ravel`, which may copy:
        #: in inference mode such an operator is not decomposed before the runtime sees it.
        views = only_aliases and not self.written and not _is_composed(func)
        self.view = views or self.name.startswith("profiler::")
        #: True if the operator returns tensors.
        self.returns_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        #: True if the operator returns only tensors that it writes.
        self.returns_written = all(r.alias_info and r.alias_info.is_write for r in schema.returns)
        tags = func.tags
        self.random = torch.Tag.nondeterministic_seeded in tags or self.name in UNTAGGED_RANDOM
        self.results = len(schema.returns)
        #: True if floats in the argument `scale_factors` determine the sizes of the results.
        self.scaled = any(argument.name == "scale_factors" for _, argument in arguments)
        self.reduced_in_place = self.name in REDUCED_IN_PLACE
        #: Flag for the contents of a new result: `UNWRITTEN`, `ZEROED`, `EXOTIC`, or 0 for any
        #: other.
        self.content = _content(self.name)
        self.sees_requires_grad = self.name in SEES_REQUIRES_GRAD
        self.statistics = self.name in HIDDEN_STATISTICS or self.name in ALWAYS_WRITTEN_STATISTICS
        #: True if the operator may resize a storage: set_, resize_, and operators with `out`.
        self.resizes = self.name.startswith(("aten::resize", "aten::set_")) or any(
            argument.kwarg_only for position, argument in arguments if self._writes(position)
        )
        self.writes = bool(self.written) or self.statistics
        effect = self.name.split("::")[0] in EFFECTS
        self.opaque = effect or self.resizes or self.name == WITHOUT_MEMORY

    @property
    def makes_or_writes(self) -> bool:
        """False if a call only returns a view, or no tensor at all, like `prim::device`."""
        return not self.view and (self.returns_tensors or self.writes)

    def _writes(self, position: int) -> bool:
        """Return True if the operator writes its argument at `position`."""
        return any(position == written for written, _ in self.written)

    def written_statistics(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the positions of the running statistics that a call with `args` writes."""
        if self.name in ALWAYS_WRITTEN_STATISTICS:
            return ALWAYS_WRITTEN_STATISTICS[self.name]
        mean, variance, training = HIDDEN_STATISTICS[self.name]
        return (mean, variance) if args[training] else ()


def is_roomy_on_host(name: str) -> bool:
    """Return True if the workspace of the operator `name` on a CPU may exceed its results."""
    return _is_one_of(ROOMY_ON_HOST, name)


def _is_one_of(parts: tuple[str, ...], name: str) -> bool:
    """Return True if `name` contains one of `parts`, or is not in PyTorch's namespace "aten"."""
    namespace, _, rest = name.partition("::")
    return namespace != "aten" or any(part in rest for part in parts)


def _check_collective(name: str, tells: bool) -> None:
    """Raise `Unsupported` for a collective if it is unknown which arguments it writes."""
    if not tells and name not in COLLECTIVES_WITHOUT_RESULT:
        raise unseen_collective(name)


def unseen_collective(name: str) -> Unsupported:
    """Return the error for a collective if it is unknown which arguments it writes."""
    return Unsupported(
        f"the collective {name} inside rekindle.budget(...): its name says that it writes to "
        "arguments, but its schema does not say to which. Call it outside of the budget, or use "
        "its functional form from torch.distributed._functional_collectives"
    )


def _is_composed(func: Any) -> bool:
    """Return True if `func` is implemented by calls of other operators."""
    composed = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]
    return isinstance(func, OpOverload) and func.has_kernel_for_dispatch_key(composed)


def _content(name: str) -> int:
    """Return the flag for the contents of a new result (`Operator.content`)."""
    if name in EMPTY:
        return UNWRITTEN
    if name in ZEROS:
        return ZEROED
    return EXOTIC if name == WITHOUT_MEMORY else 0


_known: dict[int, Operator] = {}


def operator(func: Any) -> Operator:
    """Return the properties of `func`, an `OpOverload`."""
    # Look up by id, because the hash of an overload is slow (implemented in Python).
    found = _known.get(id(func))
    return _known.setdefault(id(func), Operator(func)) if found is None else found
