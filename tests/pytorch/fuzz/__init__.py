"""Random programs of single lines, which run in plain PyTorch and within budgets.

Results must have equal bits, and errors must be equal. `program` represents a program and collects
its results. `lines` has the lines that programs are made of, and draws them with hypothesis.
`check` compares two runs and shortens a failing program. `python -m tests.pytorch.fuzz --programs
10000` runs that many programs (`scripts/sweep fuzz`).
"""
