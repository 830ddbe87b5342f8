"""Things that training scripts do to gradients and in the backward pass, for random programs.

They clip, scale, collect or check gradients.
"""

from __future__ import annotations

from tests.pytorch.hunt.table import table

GRADIENTS = table("""
# clipped
after:
    nn.utils.clip_grad_norm_(parameters(net), 0.5)
# clipped by value
after:
    nn.utils.clip_grad_value_(parameters(net), 0.05)
# scaled
after:
    for p in parameters(net):
        if p.grad is not None:
            p.grad.mul_(0.5)
# scaled past autograd
after:
    for p in parameters(net):
        if p.grad is not None:
            p.grad.data.div_(2)
# noise in gradients
after:
    for p in parameters(net):
        if p.grad is not None:
            p.grad = p.grad + 0.01 * torch.randn_like(p.grad)
# gradients kept
setup:
    old = []
after:
    old = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
# gradients taken
setup:
    old = []
last:
    old = [p.grad for p in net.parameters()]
# gradients zeroed
zero:
    optimizer.zero_grad(set_to_none=False)
# gradients of the network dropped
zero:
    net.zero_grad()
# gradients dropped by hand
zero:
    for p in net.parameters():
        p.grad = None
# gradients never dropped
zero:
    pass
# gradients dropped first
before:
    optimizer.zero_grad()
zero:
    pass
# gradient surgery
after:
    flat = torch.cat([p.grad.flatten() for p in parameters(net) if p.grad is not None])
    note(flat.norm())
    del flat
# hook on a parameter
setup:
    for p in parameters(net):
        p.register_hook(lambda g: g * 0.9)
# hook after accumulation
setup:
    def quartered(p):
        p.grad.mul_(0.25)
    for p in parameters(net):
        p.register_post_accumulate_grad_hook(quartered)
# steps in the backward pass
setup:
    owners = {p: torch.optim.SGD([p], 0.02, momentum=0.5) for p in parameters(net)}
    def stepped(p):
        owners[p].step()
        owners[p].zero_grad()
    for p in parameters(net):
        p.register_post_accumulate_grad_hook(stepped)
# pre-hook of the optimizer
setup:
    optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: nn.utils.clip_grad_norm_(parameters(net), 0.3) and None
    )
# hook of the optimizer
setup:
    decayed = 0
    def decay(optimizer, args, kwargs):
        for p in parameters(net):
            p.data.mul_(0.999)
    optimizer.register_step_post_hook(decay)
# schedule
setup:
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=30)
between:
    schedule.step()
# twice
backward:
    loss.backward(retain_graph=True)
    loss.backward()
# kept graph
backward:
    loss.backward(retain_graph=True)
# two losses
backward:
    other = y.abs().mean()
    other.backward(retain_graph=True)
    loss.backward()
    del other
# in a thread
backward:
    in_thread(lambda: loss.backward())
# into inputs
backward:
    loss.backward(inputs=parameters(net))
# weighted
backward:
    loss.backward(torch.tensor(0.5))
# with a graph
backward:
    found = torch.autograd.grad(loss, parameters(net), create_graph=True, allow_unused=True)
    loss = loss + 0.01 * sum(g.square().sum() for g in found if g is not None)
    loss.backward()
    del found
# penalty
batch:
    x.requires_grad_()
backward:
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    del slope
# curvature
backward:
    found = torch.autograd.grad(loss, parameters(net), create_graph=True, allow_unused=True)
    ways = [None if g is None else torch.randint_like(g, 2) * 2 - 1 for g in found]
    again = torch.autograd.grad(
        [g for g in found if g is not None],
        parameters(net),
        [w for w in ways if w is not None],
        allow_unused=True,
        retain_graph=True,
    )
    for p, g in zip(parameters(net), again):
        p.grad = None if g is None else g.detach() * 0.01
    loss.backward()
    del found, ways, again
# result by result
backward:
    for each in y.mean((0, 1)).unbind():
        each.backward(retain_graph=True)
    loss.backward()
# scaler
setup:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
backward:
    scaler.scale(loss).backward()
after:
    scaler.unscale_(optimizer)
    scaler.update()
# part of the way
call:
    y = net(x)
    whole, y = y, y.detach().requires_grad_()
backward:
    loss.backward()
    whole.backward(y.grad)
    del whole
# anomalies
backward:
    with torch.autograd.detect_anomaly():
        loss.backward()
# one thread
backward:
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()
# interrupted by a hook
backward:
    def fails(g):
        raise ValueError
    handle = y.register_hook(fails) if step == 1 else None
    try:
        loss.backward()
    except ValueError:
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    del handle
""")
