"""Models of other libraries, trained within budgets: `scripts/sweep libraries`."""
