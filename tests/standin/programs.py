"""Programs that train on `cuda`, each with another behavior that a CPU does not have."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from rekindle.pytorch.online import _resize

Step = Callable[[], None]
STEPS = 4


def _training(model: nn.Module, loss: Callable[[], Tensor], **options: Any) -> tuple[Any, Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return model, step


def blocks(width: int = 64, depth: int = 6, dropout: float = 0.1) -> nn.Module:
    def block() -> nn.Module:
        layers = (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(dropout))
        return nn.Sequential(*layers)

    return nn.Sequential(*(block() for _ in range(depth))).cuda()


def mlp() -> tuple[Any, Step]:
    model = blocks()
    return _training(model, lambda: model(torch.randn(256, 64, device="cuda")).pow(2).mean())


def large() -> tuple[Any, Step]:
    """Use activations of 2 MiB."""
    model = blocks(width=256)
    return _training(model, lambda: model(torch.randn(2048, 256, device="cuda")).pow(2).mean())


def of_many_sizes() -> tuple[Any, Step]:
    """Use activations of 6 to 24 MiB, so that few free blocks fit the next one."""
    widths = (64, 256, 64, 192) * 3 + (64,)
    layers = [nn.Linear(*each) for each in pairwise(widths)]
    model = nn.Sequential(*(nn.Sequential(each, nn.GELU()) for each in layers)).cuda()
    return _training(model, lambda: model(torch.randn(24576, 64, device="cuda")).pow(2).mean())


def batches_of_the_host() -> tuple[Any, Step]:
    """Make batches on the CPU inside the budget. One operand is a scalar tensor on the CPU."""
    model = blocks()
    scale = torch.tensor(0.5)
    return _training(model, lambda: (model(torch.randn(256, 64).cuda()) * scale).pow(2).mean())


def a_staging_buffer() -> tuple[Any, Step]:
    """Refill a page-locked buffer in each step, after waiting for the program's own stream."""
    model = blocks()
    buffer = torch.zeros(256, 64).pin_memory()

    def loss() -> Tensor:
        torch.cuda.current_stream().synchronize()
        buffer.copy_(torch.randn(256, 64))
        return model(buffer.to("cuda", non_blocking=True)).pow(2).mean()

    return _training(model, loss)


def convolutions() -> tuple[Any, Step]:
    def block(channels: int) -> nn.Module:
        convolution = nn.Conv2d(channels, 16, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(16), nn.ReLU(inplace=True))

    model = nn.Sequential(block(3), block(16), block(16), nn.MaxPool2d(2), block(16)).cuda()
    return _training(model, lambda: model(torch.randn(8, 3, 16, 16, device="cuda")).pow(2).mean())


def timed_convolutions() -> tuple[Any, Step]:
    """Return the program `convolutions` with `torch.backends.cudnn.benchmark = True`."""
    model, step = convolutions()

    def timed() -> None:
        with torch.backends.cudnn.flags(benchmark=True):
            step()

    return model, timed


def transformer() -> tuple[Any, Step]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
    embedding = nn.Embedding(50, 32).cuda()

    def loss() -> Tensor:
        tokens = torch.randint(50, (8, 24), device="cuda")
        with sdpa_kernel(SDPBackend.MATH):
            out = model(embedding(tokens))
        return functional.cross_entropy((out @ embedding.weight.T).flatten(0, 1), tokens.flatten())

    return _training(nn.ModuleList([model, embedding]), loss, foreach=True)


def _with_workspace(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Use a workspace eight times as large as the result, like kernels of libraries."""
    workspace = x.new_empty(8 * x.numel())
    y = compute(x)
    del workspace
    return y


@torch.library.custom_op("standin::curve_mm", mutates_args=(), device_types="cuda")
def _curve(x: Tensor) -> Tensor:
    return _with_workspace(x, torch.sin)


@torch.library.custom_op("standin::slope_mm", mutates_args=(), device_types="cuda")
def _slope(x: Tensor) -> Tensor:
    """Compute the gradient; its first call happens when memory is full."""
    return _with_workspace(x, torch.cos)


_curve.register_fake(torch.empty_like)
_slope.register_fake(torch.empty_like)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_curve.register_autograd(lambda ctx, g: g * _slope(*ctx.saved_tensors), setup_context=_save)


def workspaces() -> tuple[Any, Step]:
    model = blocks()

    def loss() -> Tensor:
        x = torch.randn(256, 64, device="cuda")
        for block in model:
            x = _curve(block(x))
        return x.pow(2).mean()

    return _training(model, loss)


def sums_by_atomics() -> tuple[Any, Step]:
    """Sum over neighbors, as in a graph network, followed by a running sum."""
    layers = blocks()
    there = torch.randint(256, (2, 512), device="cuda")

    def loss() -> Tensor:
        x = torch.randn(256, 64, device="cuda")
        for block in layers:
            x = block(x)
            x = torch.zeros_like(x).index_add(0, there[0], x[there[1]]).tanh()
        return x.cumsum(0).tanh().pow(2).mean()

    return _training(layers, loss)


def captured_in_between() -> tuple[Any, Step]:
    """Capture some blocks of each step into a graph, forward and backward."""
    import _standin

    before, inside, after = blocks(), blocks(depth=1, dropout=0.0), blocks()
    side = torch.cuda.Stream()  # CUDA does not capture on the default stream

    def loss() -> Tensor:
        x = before(torch.randn(256, 64, device="cuda"))
        side.wait_stream(torch.cuda.current_stream())
        x.record_stream(side)
        with torch.cuda.stream(side):
            _standin.capture(True)
            y = inside(x.detach().requires_grad_())
            _standin.capture(False)
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        return after(x + y).pow(2).mean()

    model, step = _training(nn.ModuleList([before, inside, after]), loss)

    def ordered() -> None:  # for the reason given in `_beside` below
        side.wait_stream(torch.cuda.current_stream())
        step()

    return model, ordered


def by_way_of_the_host() -> tuple[Any, Step]:
    """Copy a small tensor to the host, use it there, and copy it back."""
    model = blocks()

    def loss() -> Tensor:
        x = torch.randn(256, 64, device="cuda")
        for block in model:
            x = block(x)
            row = x.mean(0).to("cpu", non_blocking=True)
            torch.cuda.synchronize()
            x = x * (row.sin() + 1).to("cuda", non_blocking=True).cos()
        return x.pow(2).mean()

    return _training(model, loss)


def mixed_precision() -> tuple[Any, Step]:
    model = blocks()

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(torch.randn(256, 64, device="cuda")).float().pow(2).mean()

    return _training(model, loss)


def _beside(depth: int, *, late: bool) -> tuple[Any, Step]:
    """Run a part of the forward pass and of the backward pass on a stream of its own.

    Args:
        depth: The number of blocks in that part.
        late: True if the other part allocates memory before it waits.
    """
    first, second = blocks(), blocks(depth=depth)
    side = torch.cuda.Stream()

    def loss() -> Tensor:
        x = torch.randn(256, 64, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        x.record_stream(side)
        with torch.cuda.stream(side):
            y = second(x)
        z = first(x) if late else None
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        return ((first(x) if z is None else z) + y).pow(2).mean()

    model, step = _training(nn.ModuleList([first, second]), loss)

    def ordered() -> None:
        # The optimizer has read gradients of `second`, whose memory belongs to the side stream.
        side.wait_stream(torch.cuda.current_stream())
        step()

    return model, ordered


def a_side_stream() -> tuple[Any, Step]:
    """Run half of the forward pass on a stream of its own."""
    return _beside(6, late=False)


def a_side_stream_that_is_met_late() -> tuple[Any, Step]:
    """Run most work on the main stream, and allocate memory before waiting for the side stream."""
    return _beside(2, late=True)


def streams_in_turn() -> tuple[Any, Step]:
    """Alternate blocks between two streams; each one waits for the block before."""
    model = blocks()
    streams = (torch.cuda.Stream(), torch.cuda.Stream())

    def loss() -> Tensor:
        x = torch.randn(256, 64, device="cuda")
        before = torch.cuda.current_stream()
        for number, block in enumerate(model):
            stream = streams[number % 2]
            stream.wait_stream(before)
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                x = block(x)
            before = stream
        torch.cuda.current_stream().wait_stream(before)
        x.record_stream(torch.cuda.current_stream())
        return x.pow(2).mean()

    model, step = _training(model, loss)

    def ordered() -> None:
        # the optimizer has read gradients, whose memory belongs to these streams
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        step()

    return model, ordered


class Gathered(nn.Module):
    """A layer that gathers its weight for each pass and frees it afterwards, as a unit of FSDP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.randn(width, width) / 8)
        self.norm = nn.LayerNorm(width)
        self._weight: list[Tensor] = []  # not registered as a parameter

    def forward(self, x: Tensor) -> Tensor:
        if not self._weight:
            self._weight.append(self.shard.detach().clone().requires_grad_())
        (weight,) = self._weight
        self._gather()
        hidden = functional.gelu(x @ weight).tanh().sin().sigmoid() * 2
        result = x + self.norm(functional.dropout(hidden, 0.1))
        node: Any = result.grad_fn
        self._free(node._sequence_nr())
        result.register_hook(self._gather)
        return result

    def leave_gradient(self) -> None:
        """Give the gradient of the gathered weight to the shard, after the backward pass."""
        (weight,) = self._weight
        self.shard.grad, weight.grad = weight.grad, None
        self._free(1 << 62)

    def _gather(self, gradient: Tensor | None = None) -> None:
        (weight,) = self._weight
        if not weight.untyped_storage().nbytes():
            weight.untyped_storage().resize_(weight.numel() * weight.itemsize)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
                weight.copy_(self.shard)

    def _free(self, newest: int) -> None:
        with patch.object(_resize, "gathered_after", lambda frame: newest):
            self._weight[0].untyped_storage().resize_(0)


def gathered_parameters() -> tuple[Any, Step]:
    """Free gathered weights between forward and backward pass, as FSDP does.

    A recomputation checks that they were gathered with the same contents.
    """
    model = nn.Sequential(*(Gathered(72) for _ in range(8))).cuda()

    def loss() -> Tensor:
        return model(torch.randn(256, 72, device="cuda")).pow(2).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        for layer in model:
            layer.leave_gradient()
        optimizer.step()

    return model, step


PROGRAMS: dict[str, Callable[[], tuple[Any, Step]]] = {
    program.__name__: program
    for program in (
        mlp,
        large,
        of_many_sizes,
        batches_of_the_host,
        a_staging_buffer,
        convolutions,
        timed_convolutions,
        transformer,
        sums_by_atomics,
        captured_in_between,
        by_way_of_the_host,
        mixed_precision,
        a_side_stream,
        a_side_stream_that_is_met_late,
        streams_in_turn,
        workspaces,
        gathered_parameters,
    )
}
