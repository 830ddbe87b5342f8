"""Run programs in plain PyTorch and within budgets, and compare the results bit for bit.

The programs come from sources: random programs (`tests.pytorch.fuzz`, `hunt`, `scenes`), models of
other libraries (`libraries`), PyTorch's own test databases (`sweep`), and other projects' test
suites (`strangers`). `modes` are settings of the budget, `judge` compares the runs of a program,
and `shrink` shortens a program that fails. `tally` counts verdicts, and `workers` runs programs in
processes of their own. `python -m tests.differ SOURCE` runs a source (`scripts/sweep SOURCE`).
"""
