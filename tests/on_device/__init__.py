"""Tests for a real device that take ten minutes (`scripts/on_device`), rehearsed on a CPU."""
