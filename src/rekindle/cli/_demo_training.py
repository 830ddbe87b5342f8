"""Define the model, the text and the training loop of `rekindle demo`: a character-level GPT.

The model is ordinary PyTorch code that does not use Rekindle. A `Meter` measures memory in the same
way with a budget and without, and does not depend on Rekindle's runtime.
"""

# pyright: standard
# (strict mode reports too many unknown types in torch's stubs)
from __future__ import annotations

import gc
import statistics
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch import budget as within
from rekindle.pytorch.tensors import Meter

HEADS = 4
WARM_UP = 12  # number of steps in which the learning rate rises to its full value
COUNTS = ("evictions", "recomputations", "recompute_ns")  # figures of a `Run` to copy to `Trained`
ALPHABET = b"\n" + bytes(range(32, 127))  # the characters that the model knows: those of ASCII
ENOUGH = 1_000_000  # characters of text to read; the steps of the demo use fewer


@dataclass(frozen=True)
class Settings:
    """Settings of the model and its training. `width` is a multiple of HEADS."""

    layers: int = 12
    width: int = 128
    context: int = 128
    batch: int = 16
    steps: int = 24
    seed: int = 0

    @property
    def tokens(self) -> int:
        """The number of characters of text in one training step."""
        return self.batch * self.context


# The text to train on.


def read_text(context: int, folder: Path | None = None) -> Tensor:
    """Read the sources of Python's standard library, without characters beyond `ALPHABET`.

    Args:
        context: The number of characters that the model sees at once.
        folder: The folder to read. Default: that of the standard library.

    Returns:
        The position of each character in `ALPHABET`. It is one byte, because the measured memory
        includes the text.

    Raises:
        ValueError: The text is not longer than `context` characters.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text, others = b"", bytes({*range(256)} - {*ALPHABET})
    positions = bytes.maketrans(ALPHABET, bytes(range(len(ALPHABET))))
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes().translate(positions, others)
        if len(text) >= ENOUGH:
            break
    text = text[:ENOUGH]
    if len(text) <= context:
        raise ValueError(
            f"got {len(text)} characters of source from {folder}, wanted more than the "
            f"{context} that the model sees at once"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch_of(text: Tensor, settings: Settings, step: int) -> tuple[Tensor, Tensor]:
    """Draw the batch of a step, which depends only on the seed and the number of the step.

    Returns:
        Random pieces of the text and, for each of their characters, the following one. Both have
        the shape (batch, context).
    """
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    last = len(text) - settings.context
    starts = torch.randint(last, (settings.batch, 1), generator=generator)
    pieces = text[starts + torch.arange(settings.context + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


# The model: a small GPT.


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm_attention(x)))
        hidden = functional.gelu(self.wide(self.norm_mlp(x)))
        return x + self.dropout(self.narrow(hidden))

    def attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = (batch, time, HEADS, width // HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class GPT(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.token = nn.Embedding(len(ALPHABET), settings.width)
        self.position = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.ModuleList(Block(settings.width) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.out = nn.Linear(settings.width, len(ALPHABET), bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.token(characters) + self.position(torch.arange(characters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


# The training loop and its figures.


@dataclass(frozen=True)
class Step:
    """Figures of one training step; `peak` is the most memory (bytes) in use during the step."""

    number: int
    loss: float
    ns: Nanoseconds
    peak: Bytes


@dataclass(frozen=True)
class Trained:
    """Figures of a training run.

    Attributes:
        budget: The budget (bytes), or None.
        steps: Figures of each step.
        weights: The weights at the end.
        peak: The most memory (bytes) in use during the steps.
        constants: Memory (bytes) at the end: weights, gradients, optimizer state, text.
        evictions: Number of evictions.
        recomputations: Number of recomputed operators.
        recompute_ns: Time (ns) in recomputed operators.
    """

    budget: Bytes | None
    steps: tuple[Step, ...]
    weights: Mapping[str, Tensor]
    peak: Bytes
    constants: Bytes
    evictions: int = 0
    recomputations: int = 0
    recompute_ns: Nanoseconds = 0

    @property
    def step_ns(self) -> Nanoseconds:
        """The median time (ns) of a step."""
        return int(statistics.median(step.ns for step in self.steps))

    def budget_at(self, fraction: float) -> Bytes:
        """Return the budget `constants` plus `fraction` of the other memory at the run's peak."""
        return self.constants + int(fraction * (self.peak - self.constants))


def train(
    settings: Settings,
    text: Tensor,
    budget: Bytes | None = None,
    watch: Callable[[Step], None] = lambda step: None,
) -> Trained:
    """Train a new model, within a budget or without.

    Args:
        settings: The model and its training.
        text: The text to learn.
        budget: The budget (bytes). None: no budget.
        watch: A function that is called with the figures of each step.
    """
    torch.manual_seed(settings.seed)
    model = GPT(settings)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    steps: list[Step] = []
    with Meter() as meter, nullcontext() if budget is None else within(budget) as run:
        for number in range(settings.steps):
            meter.peak = meter.alive
            start = time.perf_counter_ns()
            characters, following = batch_of(text, settings, number)
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (number + 1) / WARM_UP)
            # No variable holds the scores: the meter would count them even while they are evicted.
            loss = functional.cross_entropy(model(characters).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            ns = time.perf_counter_ns() - start
            step = Step(number, loss.item(), ns, meter.peak)
            del loss  # this variable would keep activations in memory in the next step
            steps.append(step)
            watch(step)
        gc.collect()
        constants = meter.alive
    return Trained(
        budget,
        tuple(steps),
        model.state_dict(),
        max(step.peak for step in steps),
        constants,
        **{} if run is None else {name: getattr(run, name) for name in COUNTS},
    )


class Identical(NamedTuple):
    """Result of comparing two runs: each field is True if that part is equal bit for bit."""

    losses: bool
    weights: bool


def compare(one: Trained, other: Trained) -> Identical:
    """Compare the losses and the final weights of two runs bit for bit."""
    losses = [[step.loss.hex() for step in run.steps] for run in (one, other)]
    weights = [{n: _bits(each) for n, each in run.weights.items()} for run in (one, other)]
    return Identical(losses[0] == losses[1], weights[0] == weights[1])


def _bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Return all that must be equal; 0.0 == -0.0, although their bits differ."""
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
