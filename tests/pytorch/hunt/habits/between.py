"""Things that training scripts do between steps, as lines for random programs.

They average weights, evaluate, save and load checkpoints, and overwrite weights in place.
"""

from __future__ import annotations

from tests.pytorch.hunt.table import table

BETWEEN = table("""
# average of weights
setup:
    averaged = copy.deepcopy(net)
between:
    with torch.no_grad():
        for mine, its in zip(averaged.parameters(), net.parameters()):
            mine.lerp_(its, 0.1)
# averaged model
setup:
    averaged = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
between:
    averaged.update_parameters(net)
# averages in a dictionary
setup:
    averages = {name: p.detach().clone() for name, p in net.named_parameters()}
between:
    with torch.no_grad():
        averages = {name: 0.9 * averages[name] + 0.1 * p for name, p in net.named_parameters()}
# running loss
setup:
    mean = torch.zeros(())
last:
    mean = 0.9 * mean + 0.1 * loss.detach()
# running loss written
setup:
    mean = torch.zeros(())
last:
    mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
# running loss of two steps
setup:
    mean = 0.0
last:
    mean = (mean + loss.detach()) / 2
# best so far
setup:
    best = torch.tensor(1e9)
    best_weights = None
last:
    if loss.detach() < best:
        best = loss.detach()
        best_weights = copy.deepcopy(net.state_dict())
# last results
setup:
    last = None
last:
    last = y.detach()
# last input
setup:
    last = None
batch:
    x = x if last is None or last.shape != x.shape else x + 0.1 * last.tanh()
last:
    last = y.detach()
# losses of all steps
setup:
    seen = []
last:
    seen.append(loss.detach())
# statistics
setup:
    spread = torch.zeros(8)
last:
    spread += y.detach().var((0, 1))
# metric in a buffer
setup:
    metric = torch.zeros(4)
last:
    metric[step % 4] = loss.detach()
# evaluated
between:
    net.eval()
    with torch.no_grad():
        note(net(torch.ones(4, 8, 8)).mean())
    net.train()
# evaluated without
between:
    net.eval()
    with torch.inference_mode():
        note(float(net(torch.ones(4, 8, 8)).mean()))
    net.train()
# evaluated in training
after:
    with torch.no_grad():
        note(net(torch.ones(4, 8, 8)).sum())
# saved and loaded
between:
    net.load_state_dict(through_a_file(net.state_dict()))
# optimizer saved and loaded
between:
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
# saved before, loaded after
setup:
    first = None
before:
    if step == 0:
        first = copy.deepcopy(net.state_dict())
between:
    if step == 1:
        net.load_state_dict(first)
# state assigned
between:
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
# parts frozen
before:
    next(net.parameters()).requires_grad_(step % 2 == 0)
# weights clamped
between:
    for p in net.parameters():
        p.data.clamp_(-0.5, 0.5)
# weights decayed
between:
    with torch.no_grad():
        torch._foreach_mul_(list(net.parameters()), 0.999)
# weights exchanged
between:
    for p in net.parameters():
        p.data = p.data.clone()
# weights through a vector
between:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(net.parameters())
        nn.utils.vector_to_parameters(vector * 0.999, net.parameters())
# weights drawn again
between:
    with torch.no_grad():
        p = next(net.parameters())
        p.normal_(0, 0.2)
# weights written by numpy
between:
    next(net.parameters()).detach().numpy()[...] *= 0.99
# precision there and back
between:
    net.double().float()
# network copied
setup:
    copied = None
last:
    copied = copy.deepcopy(net)
# optimizer anew
between:
    if step == 1:
        optimizer = torch.optim.SGD(parameters(net), 0.01)
# a group more
between:
    if step == 0:
        extra = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [extra]})
# collected
between:
    gc.collect()
# seeded
before:
    torch.manual_seed(step)
# generator put back
before:
    place = torch.get_rng_state()
between:
    torch.set_rng_state(place)
# counted
last:
    note(sum(p.numel() for p in net.parameters()), x.shape)
# norms of weights
last:
    note(torch.stack([p.detach().norm() for p in net.parameters()]).sum())
# modes switched
between:
    net.train(step % 2 == 0)
# gradients off and on
before:
    torch.set_grad_enabled(False)
    passing = torch.randn(8).exp()
    torch.set_grad_enabled(True)
loss:
    loss = loss * passing.mean()
# spare memory
before:
    spare = torch.zeros(3000)
last:
    del spare
# a forward pass in vain
before:
    wasted = net(torch.randn(6, 8, 8))
    del wasted
# a graph that stays
setup:
    stays = None
before:
    if stays is not None:
        stays.backward()
last:
    stays = net(torch.randn(2, 8, 8)).sum()
# too much asked
after:
    try:
        torch.empty(1 << 46)
    except (MemoryError, RuntimeError):
        note("too much")
# a worker
between:
    note(in_thread(lambda: float(torch.ones(8).exp().sum())))
# dropped by name
last:
    del x, y, loss
""")
