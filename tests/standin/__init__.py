"""A stand-in device `cuda` for a PyTorch without CUDA: late streams, a caching allocator, poison.

Every operator is queued in its stream and runs the CPU's kernel on the same bytes. Late streams run
only as far as some wait requires, and freed memory is poisoned in stream order. So a missing wait,
or memory that is reused too early, always shows as wrong bits. Sums are those of the CPU.

It cannot test cuDNN, cuBLAS, flash kernels, atomics, NCCL, CUDA graphs, real fragmentation or real
speed.
"""
