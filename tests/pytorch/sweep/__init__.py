"""Run PyTorch's own test databases within a budget: every operator, module and optimizer.

    scripts/sweep opinfo                        # all operators, in two processes
    scripts/sweep modules --only Transformer
    scripts/sweep opinfo --shard 3/8 --few 2  # an eighth of the entries, two samples of each

Each sample runs plainly, then with everything evicted after every operator, so that everything is
recomputed. `_sample` compares the results to the last bit. `_exceptions` lists excused differences
with reasons; an entry that is not needed fails.
"""
