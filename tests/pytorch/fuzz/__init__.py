"""Random programs of single lines, which run in plain PyTorch and within budgets.

Results must have equal bits, and errors must be equal. `program` represents a program, and says
which results are right. `lines` has the lines that programs are made of, and draws them with
hypothesis. `scripts/sweep fuzz --programs 10000` runs that many programs (`tests.differ`).
"""
