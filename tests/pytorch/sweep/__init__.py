"""Run PyTorch's own test databases within a budget: every operator, module and optimizer.

    scripts/sweep opinfo                        # all operators, in two processes
    scripts/sweep modules --only Transformer
    scripts/sweep opinfo --shard 3/8 --few 2  # an eighth of the entries, two samples of each

Each sample runs in plain PyTorch, and then with everything evicted after every operator, so that
everything is recomputed. `_sample` compares the results bit for bit. `_exceptions` lists known
differences with reasons; an entry for a sample that does not differ is reported.
"""
