"""Tests for a real device within ten minutes (`scripts/on_device`), and a CPU rehearsal of them."""
