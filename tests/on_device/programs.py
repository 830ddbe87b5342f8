"""Programs that train on a device, each with another behavior that a CPU does not have.

Within a budget their results must have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.on_device import kernels
from tests.on_device.blocks import batch, blocks, training
from tests.on_device.machine import Machine, Program


def mlp(machine: Machine, **optimizer: Any) -> Any:
    """Train the blocks with Adam."""
    model = blocks(machine)
    adam = torch.optim.Adam(model.parameters(), **optimizer)
    return training(model, lambda: model(batch(machine)).square().mean(), adam)


def _host_batch(machine: Machine) -> Any:
    model, scale = blocks(machine), torch.tensor(0.5)
    made = lambda: batch(machine, "cpu").to(machine.kind)  # noqa: E731
    return training(model, lambda: (model(made()) * scale).square().mean())


def _drawn(machine: Machine) -> Any:
    model = blocks(machine)
    own = torch.Generator(machine.kind).manual_seed(5)

    def loss() -> Tensor:
        x = batch(machine)
        for number, block in enumerate(model):
            x = block(x) * torch.rand(x.shape, device=machine.kind)
            x = x * torch.rand(x.shape, device=machine.kind, generator=own)
            if number == 2:
                torch.manual_seed(7)
        return x.square().mean()

    return training(model, loss)


def _autocast(machine: Machine, dtype: torch.dtype) -> Any:
    model = blocks(machine)
    scaler = torch.amp.GradScaler(machine.kind) if dtype is torch.float16 else None

    def loss() -> Tensor:
        with torch.autocast(machine.kind, dtype):
            return model(batch(machine)).float().square().mean()

    return training(model, loss, None, scaler)


def _attention(machine: Machine, backend: SDPBackend, dropout: float) -> Any:
    width, heads = machine.size(512, 32), machine.size(8, 2)
    into = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(4)).to(machine.kind)

    def loss() -> Tensor:
        x = torch.randn(4, machine.size(256, 16), width, device=machine.kind)
        half = torch.bfloat16 if machine.is_cuda else torch.float32
        with sdpa_kernel(backend), torch.autocast(machine.kind, half, enabled=machine.is_cuda):
            for layer in into:
                q, k, v = layer(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
                y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
                x = x + y.transpose(1, 2).flatten(2).tanh()
        return x.float().square().mean()

    return training(into, loss)


def _convolutions(machine: Machine, *, benchmark: bool, last: bool) -> Any:
    width = machine.size(64, 8)
    layout = torch.channels_last if last else torch.contiguous_format

    def layer(channels: int) -> nn.Module:
        convolution = nn.Conv2d(channels, width, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True))

    model = nn.Sequential(layer(3), layer(width), layer(width), nn.MaxPool2d(2), layer(width))
    model = model.to(machine.kind, memory_format=layout)

    def loss() -> Tensor:
        size = machine.size(64, 12)
        x = torch.randn(16, 3, size, size, device=machine.kind).to(memory_format=layout)
        return model(x).square().mean()

    step = training(model, loss)[1]

    def with_benchmark() -> None:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = benchmark
        try:
            step()
        finally:
            torch.backends.cudnn.benchmark = before

    return model, with_benchmark


def _recurrent(machine: Machine, dropout: float) -> Any:
    width = machine.size(256, 16)
    model = nn.Sequential(*(nn.LSTM(width, width, 2, dropout=dropout) for _ in range(3)))
    model = model.to(machine.kind)

    def loss() -> Tensor:
        x = torch.randn(machine.size(64, 6), 16, width, device=machine.kind)
        for part in model:
            x = F.dropout(part(x)[0].tanh(), dropout)
        return x.square().mean()

    return training(model, loss)


def _language(machine: Machine) -> Any:
    width, words = machine.size(256, 16), machine.size(8000, 50)
    model = nn.Sequential(nn.Embedding(words, width), nn.Linear(width, width), nn.Tanh())
    model = model.to(machine.kind)

    def loss() -> Tensor:
        tokens = torch.randint(words, (8, 64), device=machine.kind)
        return F.cross_entropy((model(tokens) @ model[0].weight.T).flatten(0, 1), tokens.flatten())

    return training(model, loss)


def _scattered(machine: Machine) -> Any:
    model = blocks(machine)
    rows = machine.size(2048, 64)

    def loss() -> Tensor:
        x = batch(machine)
        to = torch.randint(rows, (rows, 1), device=machine.kind)
        for block in model:
            x = block(x)
            x = torch.zeros_like(x).scatter_add(0, to.expand_as(x), x).tanh().cumsum(0).sin()
        return x.square().mean()

    return training(model, loss)


def _settled(machine: Machine) -> Any:
    """Return the same program with deterministic algorithms, so that it can be recomputed."""
    model, step = _scattered(machine)

    def settled() -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            step()
        finally:
            torch.use_deterministic_algorithms(False)

    return model, settled


def _checkpointed(machine: Machine) -> Any:
    model = blocks(machine)

    def loss() -> Tensor:
        x = batch(machine)
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    return training(model, loss)


def _twice(machine: Machine) -> Any:
    model = blocks(machine, dropout=0.0)

    def loss() -> Tensor:
        x = batch(machine).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return (slope.norm(dim=-1) - 1).square().mean()

    return training(model, loss)


def _compiled(machine: Machine, **options: Any) -> Any:
    torch._dynamo.reset()  # after a few models, Dynamo runs the same code without compiling it
    model = blocks(machine)
    parts = [torch.compile(block, **options) for block in model]

    def loss() -> Tensor:
        x = batch(machine)
        for part in parts:
            x = part(x)
        return x.square().mean()

    return training(model, loss)


def _captured(machine: Machine) -> Any:
    model, inside = blocks(machine), blocks(machine, dropout=0.0)
    graph: dict[str, Any] = {}

    def loss() -> Tensor:
        if not graph:
            graph["call"] = torch.cuda.make_graphed_callables(
                inside, (batch(machine).requires_grad_(),)
            )
        return graph["call"](model(batch(machine))).square().mean()

    return training(nn.ModuleList([model, inside]), loss)


def _precise(machine: Machine) -> Any:
    model, step = mlp(machine)

    def with_tf32() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            step()
        finally:
            torch.set_float32_matmul_precision(before)

    return model, with_tf32


def programs(machine: Machine) -> Iterator[tuple[str, Program]]:
    """Yield each program by name; omit programs that need CUDA on any other device."""
    yield "mlp, Adam", mlp
    yield "mlp, Adam fused", partial(mlp, fused=True)
    yield "batch and number of the host", _host_batch
    yield "rand, own generator, seeded midway", _drawn
    yield "bfloat16", partial(_autocast, dtype=torch.bfloat16)
    for dropout in (0.0, 0.1):
        for backend in _BACKENDS if machine.is_cuda else (SDPBackend.MATH,):
            name = f"attention {backend.name.lower()}, dropout {dropout}"
            yield name, partial(_attention, backend=backend, dropout=dropout)
    for benchmark in (False, True):
        for last in (False, True):
            name = f"convolutions{', benchmark' * benchmark}{', channels last' * last}"
            yield name, partial(_convolutions, benchmark=benchmark, last=last)
    for dropout in (0.0, 0.3):
        yield f"LSTM, dropout {dropout}", partial(_recurrent, dropout=dropout)
    yield "embedding and cross entropy", _language
    yield "scatter_add, cumsum", _scattered
    yield "scatter_add, deterministic", _settled
    yield "checkpoint inside", _checkpointed
    yield "gradients of gradients", _twice
    yield "custom operators that take addresses", kernels.by_address
    if machine.is_cuda:
        yield "mlp, Adam capturable", partial(mlp, capturable=True)
        yield "float16 and a scaler", partial(_autocast, dtype=torch.float16)
        yield "TF32", _precise


def compiled(machine: Machine) -> Program:
    """Train blocks that Inductor compiles."""
    return _compiled(machine)


def compiled_whole(machine: Machine) -> Program:
    """Train a model that Inductor compiles as a whole, between two layers that it does not."""
    torch._dynamo.reset()
    model = blocks(machine)
    middle = torch.compile(model)
    first, last = blocks(machine)[0], blocks(machine)[0]
    return training(
        nn.ModuleList([first, model, last]),
        lambda: last(middle(first(batch(machine)))).square().mean(),
    )


def reduced_overhead(machine: Machine) -> Program:
    """Train blocks that are compiled for capture as CUDA graphs (mode "reduce-overhead")."""
    return _compiled(machine, mode="reduce-overhead")


def captured(machine: Machine) -> Program:
    """Capture a CUDA graph inside the budget."""
    return _captured(machine)


def triton(machine: Machine) -> Program:
    """Launch Triton kernels from a custom operator and from an `autograd.Function`."""
    return kernels.in_triton(machine)


_BACKENDS = (
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)


def on_streams(machine: Machine, *, pinned: bool = True) -> Any:
    """Run the blocks of a model alternately on two streams, each after a kernel that only waits.

    The batch of each step is written to the same buffer on the host, and copied to the device.
    """
    model = blocks(machine)
    streams = [torch.cuda.Stream() for _ in range(2)] if machine.is_cuda else [None, None]
    buffer = batch(machine, "cpu")
    buffer = buffer.pin_memory() if pinned and machine.is_cuda else buffer

    def loss() -> Tensor:
        machine.synchronize()
        buffer.copy_(batch(machine, "cpu"))
        x = buffer.to(machine.kind, non_blocking=True)
        before = torch.cuda.current_stream() if machine.is_cuda else None
        for number, block in enumerate(model):
            stream = streams[number % 2]
            if stream is not None:
                stream.wait_stream(before)
                x.record_stream(stream)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                if stream is not None:
                    torch.cuda._sleep(200_000)
                x = block(x)
            before = stream
        if before is not None:
            torch.cuda.current_stream().wait_stream(before)
            x.record_stream(torch.cuda.current_stream())
        return x.square().mean()

    model, step = training(model, loss)

    def ordered() -> None:
        for stream in streams:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
        step()

    return model, ordered
