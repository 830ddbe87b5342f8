"""Random programs, run plainly and within budgets: the same to the last bit, the same errors.

`program`: what a program is, and what it leaves behind. `lines`: the lines that programs are made
of, and how hypothesis draws them. `check`: the comparison, and how a failing program is made short.
`python -m tests.pytorch.fuzz --programs 10000` runs as many as you like (`scripts/sweep fuzz`).
"""
