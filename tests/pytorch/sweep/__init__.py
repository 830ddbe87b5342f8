"""PyTorch's own test databases against the runtime: every operator, module and optimizer.

    scripts/sweep opinfo                        # all of it, in two processes
    scripts/sweep modules --only Transformer
    scripts/sweep opinfo --shard 3/8 --few 2  # an eighth of the entries, two samples of each

Each sample runs plainly, then under the harshest setting: everything that may be evicted is
evicted after every operator, so everything is recomputed. `_sample` compares the results, to the
last bit. `_exceptions` lists excused differences with reasons; an unneeded entry fails.
"""
