"""What a device must show, in ten minutes: `scripts/on_device`; on a CPU, a rehearsal."""
