"""Compile segments: a segment is a group of light operators that is called as one operator.

Light operators are pointwise operators and reductions. Segments that differ only in names, as in
layers of a transformer, are one object, which Inductor compiles once. A recomputation of a segment
runs the same code on the same inputs as its first run. So the results have the same bits, whatever
the budget.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from rekindle._errors import Unsupported
from rekindle.pytorch.operators import kernels_in_words

#: A function that takes a list of arguments, empties this list, and returns a sequence of results.
Boxed = Callable[[list[Any]], Sequence[Tensor]]


@final
class Segment:
    """A group of light operators that Inductor compiles into one function on first use.

    Placeholders and results of `graph` have fake tensors in `meta["val"]`. No result is a view of
    another result or of an argument.

    Attributes:
        graph: The operators of the segment.
        key: A hash that equal segments share.
        makes_statistics: True if the graph contains a batch norm in training.
    """

    def __init__(self, graph: fx.Graph, key: str, *, makes_statistics: bool) -> None:
        self.graph = graph
        self.key = key
        self.makes_statistics = makes_statistics
        self._boxed: Boxed | None = None
        self._lock = threading.Lock()
        # torch.fx prints these names in generated code
        self.__name__ = self.__qualname__ = f"segment_{key[:12]}"

    def __str__(self) -> str:
        names = [_name(node) for node in self.graph.nodes if node.op == "call_function"]
        operators = "+".join(dict.fromkeys(name for name in names if name != "getitem"))
        return f"compiled({operators})#{self.key[:16]}"

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        return self.compile()(list(args))

    @property
    def is_compiled(self) -> bool:
        return self._boxed is not None

    def compile(self) -> Boxed:
        """Return the compiled code of this segment, and compile it at the first call.

        Raises:
            Unsupported: Inductor cannot compile the graph.
        """
        with self._lock:
            if self._boxed is None:
                try:
                    self._boxed = _compile(self.graph)
                except Exception as error:
                    raise Unsupported(
                        f"{self} cannot be compiled ({type(error).__name__}: "
                        f"{str(error).strip().partition(chr(10))[0]}). Check that a C++ compiler "
                        "works, or leave out compile=True (in rekindle.backend(...): write "
                        'inner="eager")'
                    ) from error
            return self._boxed

    def compare(self, args: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Check that the compiled code gives the same results as its operators run one by one.

        Args:
            args: Arguments of the segment.
            results: The results of the compiled code for these arguments.

        Raises:
            Unsupported: Results differ by more than rounding, or in strides.
        """
        wanted = fx.GraphModule({}, self.graph)(*args)
        for expected, found in zip(wanted, results, strict=True):
            if found.stride() != expected.stride() or not _close(found, expected):
                raise Unsupported(
                    f"{self}: the code that Inductor compiled gives other results than PyTorch "
                    "does when it runs the same operators one by one. Leave out compile=True; in "
                    'rekindle.backend(...), write inner="eager" instead'
                )


def _close(found: Tensor, expected: Tensor) -> bool:
    """Return True if no element of `found` differs from `expected` by more than rounding.

    The tolerance is the square root of the dtype's epsilon times the largest finite element.
    """
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(found, expected)
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return False
    digits = torch.finfo(expected.dtype).eps ** 0.5
    zero = expected.new_zeros(())
    difference = (found - expected).where(finite, zero).abs().max()
    return float(difference) <= digits * float(expected.where(finite, zero).abs().max())


_known: WeakValueDictionary[str, Segment] = WeakValueDictionary()


def segment_of(graph: fx.Graph, *, makes_statistics: bool) -> Segment:
    """Return the segment that runs the operators of `graph`. Equal graphs share one segment."""
    key = _key(graph)
    found = _known.get(key)
    if found is None:
        found = _known[key] = Segment(graph, key, makes_statistics=makes_statistics)
    return found


def _key(graph: fx.Graph) -> str:
    """Return a hash of everything that the compiled code of `graph` depends on.

    These are operators, constants, shapes, strides, dtypes, devices and global settings.
    """
    numbers: dict[fx.Node, int] = {}

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{numbers[value]}"
        if isinstance(value, list | tuple):
            return f"({','.join(text(each) for each in value)})"
        return repr(value)

    rows = [kernels_in_words(), str(torch.get_num_threads()), str(torch.get_default_dtype())]
    for node in graph.nodes:
        numbers[node] = len(numbers)
        keywords = sorted(node.kwargs.items())
        rows.append(f"{node.op} {_whole_name(node)} {text(node.args)} {text(keywords)}")
        made = [node.meta["val"]] if node.op == "placeholder" else []
        made += [each.meta["val"] for each in node.args[0]] if node.op == "output" else []
        for fake in made:
            where = (fake.stride(), fake.storage_offset(), fake.device)
            rows.append(f"{tuple(fake.shape)} {fake.dtype} {where}")
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _whole_name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else ""


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", str(target))


def _compile(graph: fx.Graph) -> Boxed:
    """Compile `graph` by Inductor's inner function, without the guards of `torch.compile`.

    Guards are not needed, because a plan is only valid for fixed sizes.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import BoxedBool

    # No shape is symbolic here, but Inductor uses its caches only with a shape environment.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    module = fx.GraphModule({}, graph)
    with (
        _disable_current_modes(),
        torch._C._DisableAutocast(),
        torch.no_grad(),
        tracing(TracingContext(mode)),
        config.patch(layout_optimization=False),
    ):
        with mode:
            args = [_like(node.meta["val"]) for node in graph.find_nodes(op="placeholder")]
            # Inductor accepts only decomposed operators, so trace again with its decompositions.
            whole = make_fx(module, decomposition_table=select_decomp_table())(*args)
        output = whole.graph.output_node()
        # Make Inductor keep the strides that results have when the operators run one by one.
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
        record_original_output_strides(whole)
        compiled: Any = compile_fx_inner(
            whole, args, cudagraphs=BoxedBool(False), is_inference=True, layout_opt=False
        )
    return getattr(compiled, "current_callable", None) or compiled


def _like(fake: Tensor) -> Tensor:
    """Return a tensor like `fake` (shape, strides, offset, dtype), made in the active fake mode."""
    size, stride, offset = tuple(fake.shape), fake.stride(), fake.storage_offset()
    if offset == 0:
        return torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device)
    length = fake.untyped_storage().nbytes() // fake.element_size()
    flat = torch.empty(length, dtype=fake.dtype, device=fake.device)
    return flat.as_strided(size, stride, offset)
