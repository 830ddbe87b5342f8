"""Tests of Rekindle beside a FakeTensor in C++, which future versions of PyTorch will have.

PyTorch's FakeTensor will use the dispatch key that the native core uses. A small library pretends
to be it. `python -m tests.pretend_fake ARGUMENTS` runs pytest with the library loaded in all
processes.
"""
