"""Random training loops that run plainly and within budgets: equal bits, and memory within bounds.

`tests.pytorch.fuzz` draws single lines; this draws whole programs as people write them: a network
of blocks, a kind of loop around it (a GAN, a rollout, LBFGS, truncated backpropagation), habits
that go with any loop (averages of weights, hooks, evaluation in between), the place where the
budget is entered, and an interruption.

`blocks`, `drivers` and `habits` are the tables that loops are drawn from; a new row is a new kind.
`kit` has the names that programs use. `loop` is a drawn loop and its text, `modes` are the settings
of the budget, `judge` compares, and `shrink` shortens a wrong loop. `known` lists known defects, so
that other ones are found. `pinned` has programs that once failed. `python -m tests.pytorch.hunt
--loops 2000 --seed 0` runs many loops (`scripts/sweep hunt`).
"""
