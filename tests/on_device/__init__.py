"""Tests for a real device, in ten minutes: `scripts/on_device`; on a CPU, a rehearsal of them."""
