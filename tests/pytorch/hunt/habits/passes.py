"""Things that training scripts do around the forward pass, as lines for random programs.

They change its input, its context (such as autocast) and its loss.
"""

from __future__ import annotations

from tests.pytorch.hunt.table import table

PASSES = table("""
# autocast
around:
    torch.autocast("cpu", torch.bfloat16)
# anomaly mode
around:
    torch.autograd.set_detect_anomaly(True)
# saved on the processor
around:
    torch.autograd.graph.save_on_cpu()
# hooks for what is saved
around:
    torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
# counted calls
around:
    Counted()
# another random generator
around:
    torch.random.fork_rng()
# kernels chosen
around:
    torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
# without mkldnn
around:
    torch.backends.mkldnn.flags(enabled=False)
# another default type
before:
    torch.set_default_dtype(torch.float64)
    scale = torch.tensor(0.5)
    torch.set_default_dtype(torch.float32)
loss:
    loss = loss * scale.float()
# checkpointed
call:
    y = checkpoint(net, x, use_reentrant=False)
# checkpointed the old way
batch:
    x.requires_grad_()
call:
    y = checkpoint(net, x, use_reentrant=True)
# called twice
call:
    y = (net(x) + net(x)) / 2
# called on parts
call:
    y = torch.cat([net(part) for part in x.split(4)])
# called in a thread
call:
    y = in_thread(lambda: net(x))
# called with copies
call:
    y = functional_call(net, {name: p * 1.0 for name, p in net.named_parameters()}, (x,))
# called on strides
call:
    y = net(x.transpose(0, 1)).transpose(0, 1)
# perturbed
batch:
    x = x + 0.01 * torch.randn_like(x)
# input needs a gradient
batch:
    x.requires_grad_()
last:
    note(x.grad)
# input of a subclass
batch:
    x = x.as_subclass(Sub)
# input from a buffer
setup:
    filled = np.zeros((6, 8, 8), np.float32)
batch:
    filled[:] = rng.random(filled.shape)
    x = torch.from_numpy(filled)[: len(x), : x.shape[1]] * 2
# input staged
setup:
    staged = torch.zeros(6, 8, 8)
batch:
    staged[: len(x), : x.shape[1]].copy_(x)
    x = staged[: len(x), : x.shape[1]] * 1.5
# input normalized in place
batch:
    x.sub_(x.mean()).div_(x.std())
# inputs from a set
setup:
    data = torch.randn(40, 8, 8)
batch:
    x = data[torch.randint(0, 40, (len(x),))][:, : x.shape[1]]
# inputs from a loader
setup:
    loader = torch.utils.data.DataLoader(torch.randn(24, 8, 8), 6, shuffle=True)
batch:
    x = next(iter(loader))[: len(x), : x.shape[1]]
# flags of the loss
loss:
    loss = loss + 1e-3 * sum(p.square().sum() for p in parameters(net))
# loss in parts
loss:
    loss = loss + F.smooth_l1_loss(y, target) + F.huber_loss(y.flip(0), target).sqrt()
# loss of places
loss:
    hits = y > 0
    loss = loss + (y[hits] - target[hits]).abs().mean().nan_to_num()
# loss read
loss:
    note(loss.item())
    if not torch.isfinite(loss):
        loss = loss.nan_to_num(0)
# results read
loss:
    note(y.tolist()[0][0])
    note(float(y.detach().numpy().mean()))
# results written
call:
    y = net(x)
    mine = y * 1.0
    mine.detach()[0].zero_()
# results dropped
loss:
    y = y.detach().clone()
# graph looked at
loss:
    note(loss.grad_fn.name(), len(loss.grad_fn.next_functions))
# retained result
loss:
    y.requires_grad and y.retain_grad()
last:
    note(y.grad)
# hook on the result
loss:
    y.requires_grad and y.register_hook(lambda g: g * 2)
""")
