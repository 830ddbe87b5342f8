"""Programs that train models of other libraries, in plain PyTorch and within budgets."""
