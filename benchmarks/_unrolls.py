"""Five programs that unroll a loop, and three ways to run the loop and its backward pass.

Each program is a step that maps a state to the next state. The ways are `plain`, and two that save
memory by hand: `checkpointed` (`torch.utils.checkpoint` around pieces of the loop) and `revolved`
(binomial checkpointing: Griewank and Walther, Algorithm 799, ACM TOMS 2000).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import comb

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

State = tuple[Tensor, ...]


class Unroll(ABC):
    """A program that unrolls a loop; its gradients are those of `leaves`.

    Attributes:
        title: What the program does, for tables.
        steps: Iterations of the loop.
        leaves: The tensors that are trained.
        first_order: False if a step computes gradients itself.
    """

    title: str
    first_order = True

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._generator = torch.Generator().manual_seed(0)
        self.leaves: list[Tensor] = []

    def weight(self, *shape: int, scale: float) -> Tensor:
        """Return a new trained tensor of random numbers."""
        self.leaves.append((self.data(*shape) * scale).requires_grad_())
        return self.leaves[-1]

    def data(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=dtype)

    def shared(self) -> State:
        """Return the tensors that all steps read; those that are no leaves are computed here."""
        return tuple(self.leaves)

    @abstractmethod
    def begin(self) -> State:
        """Return the state before the first step."""

    @abstractmethod
    def step(self, shared: State, state: State, number: int) -> State:
        """Return the next state."""

    @abstractmethod
    def loss(self, state: State) -> Tensor:
        """Return the loss at the end of the loop."""


class Normalized(Unroll):
    """The loop of pytorch/pytorch#125591: `x = c @ x; x = x / x.norm()`, as in loops.py."""

    title = "normalized products"

    def __init__(self, steps: int = 4_000, width: int = 64) -> None:
        super().__init__(steps)
        first, second, self.x = (self.data(width, width, dtype=torch.float64) for _ in range(3))
        self.first, self.second = first / first.norm(), second / second.norm()
        self.leaves = [torch.zeros(1, dtype=torch.float64, requires_grad=True)]

    def shared(self) -> State:
        return (self.first + self.leaves[0] * self.second,)

    def begin(self) -> State:
        return (self.x,)

    def step(self, shared: State, state: State, number: int) -> State:
        (matrix,), (x,) = shared, state
        x = matrix @ x
        return (x / x.norm(),)

    def loss(self, state: State) -> Tensor:
        return (self.second.t() @ state[0]).norm()


class LSTM(Unroll):
    """An LSTM cell written by hand that predicts a series, one value after the other."""

    title = "LSTM by hand"

    def __init__(self, steps: int = 2_000, batch: int = 16, hidden: int = 64) -> None:
        super().__init__(steps)
        self.hidden = hidden
        self.series = self.data(steps + 1, batch, 8)
        self.weight(8, 4 * hidden, scale=8**-0.5)
        self.weight(hidden, 4 * hidden, scale=hidden**-0.5)
        self.weight(4 * hidden, scale=0.1)
        self.weight(hidden, 8, scale=hidden**-0.5)

    def begin(self) -> State:
        zeros = self.series.new_zeros(self.series.shape[1], self.hidden)
        return zeros, zeros, self.series.new_zeros(())

    def step(self, shared: State, state: State, number: int) -> State:
        weight_in, weight_hidden, bias, weight_out = shared
        hidden, cell, loss = state
        gates = self.series[number] @ weight_in + hidden @ weight_hidden + bias
        enter, forget, new, leave = gates.chunk(4, dim=1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
        hidden = torch.sigmoid(leave) * torch.tanh(cell)
        error = hidden @ weight_out - self.series[number + 1]
        return hidden, cell, loss + error.square().mean()

    def loss(self, state: State) -> Tensor:
        return state[2] / self.steps


class Inner(Unroll):
    """The inner loop of MAML: steps of SGD on a task, differentiated (Finn et al., ICML 2017).

    The initial weights and a learning rate for each tensor are trained.
    """

    title = "MAML inner loop"
    first_order = False

    def __init__(self, steps: int = 100, batch: int = 64, hidden: int = 64) -> None:
        super().__init__(steps)
        shapes = ((hidden, 1), (hidden,), (hidden, hidden), (hidden,), (1, hidden), (1,))
        for shape in shapes:
            self.weight(*shape, scale=shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        self.rates = [torch.tensor(0.01, requires_grad=True) for _ in shapes]
        self.initial = tuple(self.leaves)
        self.leaves += self.rates
        self.x, self.test = self.data(batch, 1), self.data(batch, 1)

    def shared(self) -> State:
        return tuple(self.rates)

    def begin(self) -> State:
        return self.initial

    def error(self, weights: State, x: Tensor) -> Tensor:
        hidden = torch.tanh(functional.linear(x, weights[0], weights[1]))
        hidden = torch.tanh(functional.linear(hidden, weights[2], weights[3]))
        return functional.mse_loss(functional.linear(hidden, weights[4], weights[5]), torch.sin(x))

    def step(self, shared: State, state: State, number: int) -> State:
        gradients = torch.autograd.grad(self.error(state, self.x), state, create_graph=True)
        return tuple(
            weight - rate * gradient
            for weight, rate, gradient in zip(state, shared, gradients, strict=True)
        )

    def loss(self, state: State) -> Tensor:
        return self.error(state, self.test)


class Burgers(Unroll):
    """A solver of Burgers' equation with a learned correction, trained through its rollout."""

    title = "PDE rollout"

    def __init__(self, steps: int = 1_000, batch: int = 16, cells: int = 128) -> None:
        super().__init__(steps)
        self.cells = cells
        self.weight(8, 1, 5, scale=0.3)
        self.weight(8, scale=0.1)
        self.weight(1, 8, 5, scale=0.01)
        place = torch.arange(cells) * (2 * torch.pi / cells)
        self.u = torch.sin(place + self.data(batch, 1))[:, None]
        self.target = torch.sin(place)[None, None].expand(batch, 1, cells) / 2

    def begin(self) -> State:
        return self.u, self.u.new_zeros(())

    def step(self, shared: State, state: State, number: int) -> State:
        inner, bias, outer = shared
        u, loss = state
        width, time = 2 * torch.pi / self.cells, 0.2 / self.cells
        right, left = torch.roll(u, -1, dims=2), torch.roll(u, 1, dims=2)
        flux = (right.square() - left.square()) / (4 * width)
        diffusion = 0.02 * (right - 2 * u + left) / width**2
        hidden = functional.conv1d(functional.pad(u, (2, 2), mode="circular"), inner, bias)
        hidden = functional.pad(torch.tanh(hidden), (2, 2), mode="circular")
        u = u + time * (diffusion - flux + functional.conv1d(hidden, outer))
        if (number + 1) % 100 == 0:
            loss = loss + functional.mse_loss(u, self.target)
        return u, loss

    def loss(self, state: State) -> Tensor:
        return state[1] + functional.mse_loss(state[0], self.target)


class NeuralODE(Unroll):
    """A Neural ODE, integrated by the classical Runge-Kutta method with fixed steps."""

    title = "Neural ODE, RK4"

    def __init__(self, steps: int = 1_000, batch: int = 64, hidden: int = 64) -> None:
        super().__init__(steps)
        self.y = self.data(batch, 2)
        self.target = self.data(batch, 2)
        self.weight(hidden, 2, scale=0.5)
        self.weight(hidden, scale=0.1)
        self.weight(2, hidden, scale=hidden**-0.5)

    def begin(self) -> State:
        return self.y, self.y.new_zeros(())

    def step(self, shared: State, state: State, number: int) -> State:
        inner, bias, outer = shared
        y, energy = state
        time = 4 / self.steps

        def slope(y: Tensor) -> Tensor:
            return functional.linear(torch.tanh(functional.linear(y, inner, bias)), outer)

        first = slope(y)
        second = slope(y + time / 2 * first)
        third = slope(y + time / 2 * second)
        fourth = slope(y + time * third)
        y = y + time / 6 * (first + 2 * second + 2 * third + fourth)
        return y, energy + time * first.square().mean()

    def loss(self, state: State) -> Tensor:
        return functional.mse_loss(state[0], self.target) + 0.01 * state[1]


PROGRAMS: dict[str, type[Unroll]] = {
    "normalized": Normalized,
    "lstm": LSTM,
    "maml": Inner,
    "burgers": Burgers,
    "ode": NeuralODE,
}


# -- the loops ------------------------------------------------------------------------------------


def advance(program: Unroll, shared: State, state: State, begin: int, end: int) -> State:
    """Run the steps from `begin` to `end`."""
    for number in range(begin, end):
        state = program.step(shared, state, number)
    return state


def plain(program: Unroll) -> Tensor:
    """Run the loop and its backward pass; return the loss."""
    state = advance(program, program.shared(), program.begin(), 0, program.steps)
    loss = program.loss(state)
    loss.backward()
    return loss.detach()


def checkpointed(program: Unroll, piece: int) -> Tensor:
    """Run the loop as `plain` does, with `torch.utils.checkpoint` around each `piece` of steps."""
    shared, state = program.shared(), program.begin()
    for begin in range(0, program.steps, piece):
        end = min(begin + piece, program.steps)
        state = checkpoint(advance, program, shared, state, begin, end, use_reentrant=False)
    loss = program.loss(state)
    loss.backward()
    return loss.detach()


def revolved(program: Unroll, slots: int) -> Tensor:
    """Run the loop as `plain` does, with `slots` stored states and one step in memory at a time."""
    shared = program.shared()
    leaves = tuple(each if each.is_leaf else each.detach().requires_grad_() for each in shared)
    adjoint = _Adjoint(program, leaves)
    stored = [(program.begin(), 0, program.steps, slots)]
    while stored:
        state, begin, end, slots = stored.pop()
        if end - begin == 1:
            adjoint.step(state, begin)
            continue
        middle = begin + advance_by(end - begin, slots)
        with torch.no_grad():
            later = advance(program, leaves, state, begin, middle)
        stored.append((state, begin, middle, slots))
        stored.append((later, middle, end, max(0, slots - 1)))
    for each, leaf in zip(shared, leaves, strict=True):
        if each is not leaf:
            each.backward(leaf.grad)
    return adjoint.loss


class _Adjoint:
    """The backward pass of a loop, from the last step to the first, with the state's gradients."""

    def __init__(self, program: Unroll, shared: State) -> None:
        self._program = program
        self._shared = shared
        self._gradients: list[Tensor | None] = []
        self.loss = torch.tensor(0.0)

    def step(self, state: State, number: int) -> None:
        """Run one step from `state`, and its backward pass."""
        state = tuple(each.detach().requires_grad_() for each in state)
        after = self._program.step(self._shared, state, number)
        if number == self._program.steps - 1:
            loss = self._program.loss(after)
            self.loss = loss.detach()
            loss.backward()
        else:
            pairs = zip(after, self._gradients, strict=True)
            used = [(each, gradient) for each, gradient in pairs if gradient is not None]
            torch.autograd.backward([each for each, _ in used], [gradient for _, gradient in used])
        self._gradients = [each.grad for each in state]


def advance_by(length: int, slots: int) -> int:
    """Return after how many of `length` steps to store the next state (Griewank and Walther 2000).

    Let c = slots + 1, the number of stored states with the first one included. If no step may run
    forward more than r times, a backward pass through at most comb(c + r, c) steps is possible.
    The steps after the next stored state have only c - 1 stored states, and the steps before it
    may run at most r - 1 times. The result follows from these two limits.
    """
    if not slots:
        return length - 1
    stored, rounds = slots + 1, 1
    while comb(stored + rounds, stored) < length:
        rounds += 1
    behind = comb(stored - 1 + rounds, rounds)
    before = comb(stored + rounds - 2, stored) if rounds > 1 else 1
    return max(length - behind, before)
