"""PyTorch's own test databases against the runtime: every operator, module and optimizer.

    scripts/sweep opinfo                        # all of it, in two processes
    scripts/sweep modules --only Transformer
    scripts/sweep opinfo --shard 3/8 --few 2  # an eighth of the entries, two samples of each

Each sample runs plainly, then under the harshest setting: everything that may be let go is
let go after every operator, so everything is recomputed. What is compared, to the last bit, is in
`_sample`; what is excused is in `_exceptions`, with its reason; an entry that is not needed fails.
"""
