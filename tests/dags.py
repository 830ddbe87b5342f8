"""Make the traces of random programs. Equal seeds give equal traces."""

from __future__ import annotations

import random

from rekindle._types import ValueId
from rekindle.trace import Trace, TraceBuilder


def random_dag(
    length: int,
    rng: random.Random,
    *,
    sources: int = 2,
    largest: int = 8,
    backward: bool = True,
) -> Trace:
    """Make the trace of a random program with all features of real programs.

    It has operators with several outputs, views, in-place writes, user-held values, zero-byte
    storages, early releases, and sources that are dropped immediately.

    Args:
        length: The number of operators of the forward pass.
        rng: The random generator for all decisions. Tests with hypothesis pass `st.randoms()`.
        sources: The number of parameters.
        largest: The largest size (bytes) of a storage.
        backward: Add a backward pass that reads the remaining values in reverse order.
    """
    builder = TraceBuilder("random")
    alive: list[ValueId] = []  # values that have one reference and whose storage is not overwritten
    held: list[ValueId] = []
    sizes: dict[ValueId, int] = {}
    parameters: list[ValueId] = []
    for _ in range(sources):
        nbytes = rng.randint(0, largest)
        parameters.append(builder.source(nbytes, held=True))
        sizes[parameters[-1]] = nbytes
    # Drop a parameter immediately, like a tensor that is left over from an earlier step.
    if sources > 1 and rng.random() < 0.2:
        builder.drop(parameters.pop(0))
    storages: dict[ValueId, int] = {}

    def forget(value: ValueId) -> None:
        builder.release(value)
        alive.remove(value)

    for number in range(length):
        choice = rng.random()
        inputs = [rng.choice(alive) for _ in range(rng.randint(0, 2)) if alive]
        inputs += [rng.choice(parameters)] if parameters and rng.random() < 0.3 else []
        cost = rng.randint(0, 9)
        if choice < 0.12 and alive:
            base = rng.choice(alive)
            (view,) = builder.call(f"view{number}", cost, [base], [0], aliases=[base])
            alive.append(view)
            sizes[view], storages[view] = sizes[base], storages[base]
        elif choice < 0.24 and alive:
            base = rng.choice(alive)
            old = [value for value in alive if storages[value] == storages[base]]
            (new,) = builder.call(
                f"write_{number}", cost, [base, *inputs], [sizes[base]], overwrites=[(0, base)]
            )
            for value in old:  # End the references to all values of the overwritten storage.
                if value in held:
                    held.remove(value)
                forget(value)
            alive.append(new)
            sizes[new], storages[new] = sizes[base], number
        else:
            wanted = [rng.randint(0, largest) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
            hold = rng.random() < 0.2
            outputs = builder.call(f"op{number}", cost, inputs, wanted, held=hold)
            for position, (value, nbytes) in enumerate(zip(outputs, wanted, strict=True)):
                sizes[value], storages[value] = nbytes, (number << 4) + position
                if hold:
                    builder.retain(value)
                    held.append(value)
                alive.append(value)
        # With a small probability, overwrite a parameter as an optimizer step does.
        if parameters and rng.random() < 0.04:
            old = parameters.pop(0)
            nbytes = sizes[old]
            parameters += builder.call(
                f"step{number}",
                1,
                [old],
                [nbytes],
                overwrites=[(0, old)],
                replayable=False,
                held=True,
            )
            sizes[parameters[-1]] = nbytes
        if held and rng.random() < 0.5:
            builder.drop(held.pop(rng.randrange(len(held))))
        if len(alive) > 3 and rng.random() < 0.25:
            forget_at = rng.choice(alive)
            if forget_at not in held:
                forget(forget_at)
    for value in held:
        builder.drop(value)
    if backward:
        for number, value in enumerate(reversed(list(alive))):
            if rng.random() < 0.3:
                builder.use(value)
                builder.call(f"read{number}", rng.randint(0, 9), [value], [], replayable=False)
                builder.drop(value)
            else:
                gradient = builder.call(f"grad{number}", rng.randint(0, 9), [value], [sizes[value]])
                forget_gradient = rng.random() < 0.8
                if forget_gradient:
                    builder.release(gradient[0])
                else:
                    builder.pin(gradient[0])
            forget(value)
    return builder.build()
