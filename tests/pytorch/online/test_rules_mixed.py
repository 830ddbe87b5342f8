"""Tests of programs with autocast, grad modes, complex and sparse tensors, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from tests.pytorch.harsh import deeper, harshest, vector

Step = Callable[[], object]


def test_training_under_autocast_matches_pytorch() -> None:
    """Recomputation runs without autocast: the casts are among the recorded operators."""

    def program() -> Step:
        network = nn.Sequential(
            *[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(5)]
        )
        batch = torch.rand(200, 8)

        def step() -> object:
            with torch.autocast("cpu", torch.bfloat16):
                x = network(batch)
                loss = (x @ x.t()[:, :8]).softmax(-1).float().square().sum()
                del x
            loss.backward()
            return loss, network

        return step

    harsh = harshest(program)
    assert harsh.again["_to_copy"] > 0
    assert harsh.again["addmm"] > 0


def test_backward_under_autocast_matches_pytorch() -> None:
    def program() -> Step:
        weight = torch.rand(40, 40, requires_grad=True)

        def step() -> object:
            with torch.autocast("cpu", torch.bfloat16):
                x = weight
                for _ in range(5):
                    x = (x @ weight).sin() + x.double().exp().half().float() * 0.01
                loss = x.float().sum()
                del x
                loss.backward()
            return loss, weight

        return step

    harshest(program)


def test_recomputation_inside_autocast_ignores_autocast() -> None:
    """If autocast were on, recomputed matrix products would be rounded to bfloat16."""

    def program() -> Step:
        weight = torch.rand(40, 40, requires_grad=True)

        def step() -> object:
            x = weight
            for _ in range(6):
                x = ((x @ weight) * 0.05).sin().exp()
            loss = x.sum()
            del x
            with torch.autocast("cpu", torch.bfloat16):
                loss.backward()
            return loss, weight

        return step

    assert harshest(program).again["mm"] > 0


def test_values_of_no_grad_and_inference_mode_match_pytorch() -> None:
    """Values made in these modes cannot be recomputed, even if autograd saves them later."""

    def program() -> Step:
        network = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        batch, weight = torch.rand(100, 8), torch.rand(100, 8, requires_grad=True)

        def step() -> object:
            with torch.no_grad():
                target = network(batch).softmax(-1)
                with torch.enable_grad():
                    side = (weight.sin() * weight).exp()
            with torch.inference_mode():
                score = network(batch).mean()
            loss = (network(batch) * weight - target).square().sum() + deeper(side, 6).sum()
            del target, side
            loss.backward()
            return loss, float(score), network, weight

        return step

    harshest(program)


def test_saved_tensor_hooks_and_checkpoints_match_pytorch() -> None:
    def program() -> Step:
        network = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 8))
        batch = torch.rand(100, 8, requires_grad=True)

        def step() -> object:
            x = deeper(batch, 4)
            x = checkpoint(network, x, use_reentrant=False)
            with save_on_cpu():
                x = x.sin() * x
            x = checkpoint(network, x, use_reentrant=True) + deeper(x, 4)
            loss = x.square().sum()
            del x
            loss.backward()
            return loss, network, batch

        return step

    harshest(program)


def test_complex_numbers_and_sparse_gradients_match_pytorch() -> None:
    """Complex values are evicted like others; sparse values are kept."""

    def program() -> Step:
        table = nn.Embedding(20, 50, sparse=True)
        words = torch.randint(20, (30,))

        def step() -> object:
            x = table(words)
            spectrum = torch.fft.rfft(x.sin())
            y = torch.fft.irfft(spectrum * spectrum.conj(), n=50)
            loss = deeper(y * 0.01, 6).sum()
            del x, y, spectrum
            loss.backward()
            assert table.weight.grad is not None
            return loss, table.weight.grad.to_dense()

        return step

    harshest(program)


def test_recursive_tree_of_deleted_values_matches_pytorch() -> None:
    """The program holds only the root of a tree. Gradients of leaves are summed in equal order."""

    def program() -> Step:
        weight = vector(True)

        def tree(depth: int) -> Tensor:
            if not depth:
                return weight.sin()
            return (tree(depth - 1) * tree(depth - 1)).cos() * 0.9

        def step() -> object:
            loss = tree(4).sum()
            loss.backward()
            return loss, weight

        return step

    harshest(program)
