"""Random programs that run plainly and within budgets: equal bits, and equal errors.

`program` represents a program and collects its results. `lines` has the lines that programs are
made of, and draws them with hypothesis. `check` compares two runs and shortens a failing program.
`python -m tests.pytorch.fuzz --programs 10000` runs that many programs (`scripts/sweep fuzz`).
"""
