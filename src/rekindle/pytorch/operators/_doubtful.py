"""Operators whose recomputation may give different bits for the same inputs.

There are three kinds of such operators. On an accelerator, some operators sum by atomics, in the
order in which threads arrive. For others a library times several kernels and takes the fastest.
PyTorch's deterministic algorithms avoid these two kinds. The third kind is dropout inside a
recurrent network of cuDNN or MIOpen. It draws random numbers from a private buffer that its schema
does not mark as written.

The tables omit two cases. The results of `scatter` and `index_put` with duplicate indices are
undefined anyway. Operators that run only in backward passes are not recomputed, unless gradients
are differentiated again (`create_graph=True`). The tables contain the operators that such a program
recomputes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, final

import torch
from torch import Tensor

from rekindle.pytorch.operators._switches import kernels_are_timed


@final
class Doubt(IntEnum):
    """The reason why recomputing an operator call may give different bits."""

    NONE = 0
    TIMED = 1  #: a library times several kernels and takes the fastest
    ATOMICS = 2  #: the operator sums by atomics, in varying order
    ACCUMULATES = 3  #: the operator sums by atomics if its argument `accumulate` is True
    OWN_STATE = 4  #: the operator draws random numbers from a state that is an argument


#: Operators that sum by atomics, without "aten::". Source: PyTorch's list in the documentation of
#: `torch.use_deterministic_algorithms`.
ATOMICS = {
    "index_add", "index_add_", "index_reduce", "index_reduce_", "scatter_add", "scatter_add_",
    "scatter_reduce", "scatter_reduce_", "cumsum", "cumsum_", "histc", "nll_loss2d_forward",
    "max_unpool2d", "max_unpool3d",
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "_ctc_loss_backward",
    "_cudnn_attention_backward", "_efficient_attention_backward", "_embedding_bag_backward",
    "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward",
    "_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward", "_segment_reduce_backward",
    "_upsample_bicubic2d_aa_backward", "_upsample_bilinear2d_aa_backward",
    "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", "avg_pool2d_backward",
    "avg_pool3d_backward", "col2im", "convolution_backward", "embedding_dense_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward", "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward", "reflection_pad1d_backward",
    "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward", "unfold_backward",
    "upsample_bicubic2d_backward", "upsample_bilinear2d_backward", "upsample_linear1d_backward",
    "upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward",
    "upsample_trilinear3d_backward",
}  # fmt: skip
#: Operators that sum by atomics if `accumulate` is True -> position of this argument.
ACCUMULATING = {
    "index_put": 3,
    "index_put_": 3,
    "_index_put_impl_": 3,
    "_unsafe_index_put": 3,
    "put": 3,
    "put_": 3,
}
TIMED = {
    "_convolution",
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_add_relu",
    "cudnn_convolution_relu",
    "cudnn_convolution_transpose",
}
#: Argument names of operators that draw random numbers from their argument `dropout_state`.
_OWN_STATE = ("dropout", "train", "dropout_state")


def doubt_of(schema: Any) -> Doubt:
    """Return the reason why recomputing the operator of `schema` may give different bits."""
    namespace, _, name = schema.name.partition("::")
    if _positions(schema) is not None:
        return Doubt.OWN_STATE
    if namespace != "aten":
        return Doubt.NONE
    if name in ATOMICS:
        return Doubt.ATOMICS
    if name in ACCUMULATING:
        return Doubt.ACCUMULATES
    return Doubt.TIMED if name in TIMED else Doubt.NONE


def may_differ(doubt: Doubt, schema: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Return True if an operator call must not be recomputed, as it may give different bits.

    Args:
        doubt: The result of `doubt_of` for this operator.
        schema: The schema of the operator.
        args: The positional arguments of the call.
        tensors: The tensors among these arguments.
    """
    if doubt is Doubt.NONE:
        return False
    if doubt is Doubt.OWN_STATE:
        positions = _positions(schema)
        assert positions is not None
        return all(len(args) > p and _draws(args[p]) for p in positions)
    if all(tensor.is_cpu for tensor in tensors):
        return False
    if doubt is Doubt.TIMED:
        return kernels_are_timed()
    if torch.are_deterministic_algorithms_enabled():
        return False
    if doubt is Doubt.ACCUMULATES:
        position = ACCUMULATING[schema.name.partition("::")[2]]
        return len(args) > position and bool(args[position])
    return True


def _draws(argument: Any) -> bool:
    """Return True if a dropout argument with this value makes the operator draw random numbers."""
    return isinstance(argument, Tensor) or (argument is not None and argument > 0)


def _positions(schema: Any) -> tuple[int, ...] | None:
    """Return the positions of the dropout arguments, or None without a `dropout_state`."""
    names = [argument.name for argument in schema.arguments]
    if _OWN_STATE[-1] not in names:
        return None
    return tuple(names.index(name) for name in _OWN_STATE if name in names)
