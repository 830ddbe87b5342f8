"""A stand-in device: a simulation of the device `cuda`, for a PyTorch without CUDA.

It has streams and a caching allocator. Every operator is queued in its stream, and runs the CPU's
kernel on host memory. A late stream runs its queue only as far as some wait requires, and freed
memory is overwritten (poisoned) in stream order. So a missing wait, or memory that is reused too
early, always shows as wrong bits.

The stand-in cannot test cuDNN, cuBLAS, flash kernels, atomics, NCCL, CUDA graphs, real
fragmentation or real speed.
"""
