"""Programs that train models of other libraries, plainly and within budgets."""
