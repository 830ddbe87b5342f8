"""A stand-in `cuda` for a PyTorch without: streams that run late, a caching allocator, poison.

Every operator is queued in its stream and runs the CPU's kernel on the same bytes. Late streams run
only up to what somebody waits for, and freed memory is poisoned in stream order: a missing wait, or
memory given out too early, shows as wrong bits, every time. Operators' sums are those of the CPU.

What it cannot show: cuDNN, cuBLAS, flash kernels, atomics, NCCL, CUDA graphs, real fragmentation,
real speed.
"""
