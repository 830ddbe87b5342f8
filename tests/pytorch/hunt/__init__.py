"""The hunt: a search for random training loops that fail within a budget.

Each random loop runs in plain PyTorch and within budgets. The results must be equal bit for bit,
and the memory must stay within the budget.

`tests.pytorch.fuzz` draws programs of single lines. The hunt draws programs as people write them: a
network of blocks, a kind of loop around it (a GAN, a rollout, LBFGS, truncated backpropagation),
habits that fit any loop (averages of weights, hooks, evaluation between steps), the place where
the budget is entered, and an interruption.

`blocks`, `drivers` and `habits` are the tables that loops are drawn from; each row is one block,
kind of loop or habit. `kit` defines the names that programs use. `loop` is a drawn loop and its
source, `script` runs a source, and `modes` are the settings of the budget. `known` lists known
defects, which are not reported again. `pinned` has programs that once failed.
`scripts/sweep hunt --loops 2000` runs many loops (`tests.differ`).
"""
