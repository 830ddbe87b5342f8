"""Other projects' test suites, each test run within a budget: `scripts/sweep strangers`."""
