"""Random training loops, run plainly and within budgets: the same to the last bit, and memory.

Where `tests.pytorch.fuzz` draws single lines, this draws whole programs as people write them: a
network of blocks, a kind of loop around it (a GAN, a rollout, LBFGS, truncated backpropagation),
habits that go with any loop (averages of weights, hooks, evaluation in between), where the budget
is entered, and an interruption.

`blocks`, `drivers`, `habits`: the tables that are drawn from; a line more is a kind more. `kit`:
what programs can name. `loop`: a drawn loop, and its text. `modes`: the ways in which it runs
within a budget. `judge`: the comparison. `shrink`: a shorter loop that is wrong too. `known`: what
is known to be wrong, so that the rest can be hunted. `pinned`: what once was.
`python -m tests.pytorch.hunt --loops 2000 --seed 0` runs many (`scripts/sweep hunt`).
"""
