"""Provide the names that random programs may use: `from tests.pytorch.hunt.kit import *`."""

# ruff: noqa: F401 - the imports are used by the programs

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.pytorch.fuzz.program import Dirty, Scribbles, Several
from tests.pytorch.hunt.functions import (
    Buffered,
    Cube,
    MainGrad,
    Once,
    OnContext,
    OwnGrad,
    PartlyUsed,
    Recomputes,
    Reversed,
    SavesInput,
    SavesResult,
)
from tests.pytorch.hunt.trip import Interrupted, interrupts


class Symmetric(nn.Module):
    """A parametrization that makes a weight symmetric."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


class Buffers(nn.Module):
    """A module with a buffer, and with a NumPy array that is no tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.rand(8) + 0.5)
        self.array = np.ones(8, np.float32)


class Generators(nn.Module):
    """A module with a random number generator of its own."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(3)


class Sub(torch.Tensor):
    """A tensor subclass that does nothing."""


class Weight(nn.Parameter):
    """A parameter of a subclass that does nothing."""


class Counted(TorchFunctionMode):
    """A counter of Python calls."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        counts[func] += 1
        return func(*args, **(kwargs or {}))


counts: Counter[object] = Counter()


def _gelu(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788 * x * (1 + 0.044715 * x * x)))


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)  # since torch 2.15
    scripted_gelu = torch.jit.script(_gelu)


@torch.library.custom_op("hunt::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * np.float32(0.5))


halve.register_fake(torch.empty_like)
halve.register_autograd(lambda ctx, gradient: gradient * 0.5)


def in_thread(work):
    """Return the result of `work` in another thread, or raise its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def parameters(module):
    return [p for p in module.parameters() if p.requires_grad]


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
