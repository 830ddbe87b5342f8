"""Blocks of random networks with custom functions, checkpoints, hooks and state."""

from __future__ import annotations

from tests.pytorch.hunt.table import table

HOOKS = table("""
# saves_input
forward:
    x = SavesInput.apply(x)
# saves_result
forward:
    x = SavesResult.apply(x)
# dirty
forward:
    x = Dirty.apply(x * 1.0)
# on_context
forward:
    x = OnContext.apply(x)
# once
forward:
    x = Once.apply(x)
# several
forward:
    x, a, b = Several.apply(x)
    x = x + b
# scribbles
forward:
    x = Scribbles.apply(x + 0.5)
# reversed
forward:
    x = Reversed.apply(x)
# recomputes
build:
    M = nn.Linear(8, 8)
forward:
    x = Recomputes.apply(M, x, *M.parameters())
# main_grad
build:
    M = nn.Linear(8, 8, bias=False)
forward:
    x = MainGrad.apply(x, M.weight, M)
# own_grad
build:
    M = nn.Linear(8, 8, bias=False)
forward:
    x = OwnGrad.apply(x, M.weight)
# second_order
forward:
    x = Cube.apply(x * 0.5)
# nothing
forward:
    x, a = PartlyUsed.apply(x)
# buffer_saved
build:
    M_a = Buffers()
forward:
    x = Buffered.apply(x, M_a)
# checkpointed
build:
    M = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))
forward:
    x = checkpoint(M, x, use_reentrant=False)
# reentrant
build:
    M = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8))
forward:
    x = checkpoint(M, x, use_reentrant=True)
# sequential
build:
    M = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
forward:
    x = checkpoint_sequential(M, 2, x, use_reentrant=False)
# selective
build:
    M = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
forward:
    x = checkpoint(
        M,
        x,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    )
# on_cpu
forward:
    with torch.autograd.graph.save_on_cpu():
        x = x.exp().clamp(max=3).square()
# packed_hooks
forward:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        x = x.sin() * x
# tensor_hook
forward:
    x = x * 1.5
    x.register_hook(lambda g: g.clamp(-0.1, 0.1)) if x.requires_grad else None
# hook_writes
forward:
    x = x.tanh()
    x.register_hook(lambda g: g.mul_(0.5)) if x.requires_grad else None
# hook_reads
forward:
    a = x.exp()
    x = a.log1p()
    x.register_hook(lambda g, a=a: g * a.sigmoid()) if x.requires_grad else None
# retained
forward:
    x = x.sin()
    x.requires_grad and x.retain_grad()
    self.kept = x
# forward_hook
build:
    M = nn.Linear(8, 8)
    M.register_forward_hook(lambda module, args, result: result * 0.5)
forward:
    x = M(x)
# pre_hook
build:
    M = nn.Linear(8, 8)
    M.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
forward:
    x = M(x)
# backward_hook
build:
    M = nn.Linear(8, 8)
    M.register_full_backward_hook(
        lambda module, before, after: (before[0] if before[0] is None else before[0] * 2,)
    )
forward:
    x = M(x)
# features
build:
    M = nn.Linear(8, 8)
    M.register_forward_hook(lambda module, args, result: setattr(module, "seen", result.detach()))
forward:
    x = M(x)
# running
build:
    M = nn.Linear(8, 8)
    M.mean = torch.zeros(8)
forward:
    x = M(x) - M.mean
    if self.training:
        M.mean = 0.9 * M.mean + 0.1 * x.detach().mean((0, 1))
# running_
build:
    M = nn.Linear(8, 8)
    M.register_buffer("mean", torch.zeros(8))
forward:
    x = M(x) - M.mean
    with torch.no_grad():
        M.mean.lerp_(x.mean((0, 1)), 0.1)
# counter
build:
    M = nn.Linear(8, 8)
    M.register_buffer("count", torch.zeros((), dtype=torch.long))
forward:
    M.count += 1
    x = M(x) / M.count
# queue
build:
    M = nn.Linear(8, 8)
    M.register_buffer("queue", torch.randn(6, 8))
    M.next = 0
forward:
    x = M(x)
    a = (x @ M.queue.clone().t()).softmax(-1) @ M.queue.clone()
    with torch.no_grad():
        M.queue[M.next] = x.mean((0, 1))
        M.next = (M.next + 1) % 6
    x = x + a
# codebook
build:
    M = nn.Module()
    M.register_buffer("codes", torch.randn(5, 8))
forward:
    a = torch.cdist(x.reshape(-1, 8), M.codes).argmin(-1)
    b = M.codes[a].view_as(x)
    with torch.no_grad():
        M.codes.index_add_(0, a, x.reshape(-1, 8), alpha=0.01)
    x = x + (b - x).detach()
# cache
build:
    M = nn.Linear(8, 8)
forward:
    a, b = [], []
    for each in x[:, :4].unbind(1):
        a.append(M(each))
        b.append(torch.stack(a, 1).mean(1))
    x = x + torch.stack(b, 1).mean(1, keepdim=True)
# preallocated
forward:
    a = torch.empty(x.shape)
    for i in range(x.shape[1]):
        a[:, i] = x[:, i] * i
    x = a.tanh()
# zeros_written
forward:
    a = torch.zeros_like(x)
    a[:, ::2] = x[:, ::2].exp().clamp(max=2)
    x = x + a
# state_carried
build:
    M = nn.Linear(8, 8)
    M.state = torch.zeros(8)
forward:
    x = M(x) + M.state
    M.state = x.detach()[0, -1].clamp(-1, 1)
# state_view
build:
    M = nn.Linear(8, 8)
    M.state = torch.zeros(8)
forward:
    x = M(x + M.state)
    M.state = x[0, 0].detach()
""")
