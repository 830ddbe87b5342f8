"""Run the test suites of other projects within a budget: `scripts/sweep strangers`."""
