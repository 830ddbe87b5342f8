"""Blocks of random networks that autograd sees only in part.

They change modes (such as `no_grad`), write past autograd, read by NumPy, or catch errors.
"""

from __future__ import annotations

from tests.pytorch.hunt.table import table

CORNERS = table("""
# no_grad
forward:
    with torch.no_grad():
        a = x.softmax(-1).cumsum(-1)
    x = x * a
# inference
forward:
    with torch.inference_mode():
        a = float(x.square().mean())
    x = x / (1 + a)
# enabled
build:
    M = nn.Linear(8, 8)
forward:
    with torch.enable_grad():
        a = M(x).tanh()
    x = x + a
# inner_grad
build:
    M = nn.Linear(8, 8)
forward:
    with torch.enable_grad():
        a = x.detach().requires_grad_()
        (b,) = torch.autograd.grad(M(a).square().sum(), a)
    x = x - 0.1 * b
# energy
build:
    M = nn.Linear(8, 8)
forward:
    with torch.enable_grad():
        a = x if x.requires_grad else x.requires_grad_()
        (b,) = torch.autograd.grad(M(a).tanh().sum(), a, create_graph=True)
    x = x - b
# data_written
forward:
    x = x + 1
    x.data.mul_(0.5)
# data_read
forward:
    x = x * x.data.abs().mean()
# data_replaced
forward:
    x = x.tanh()
    x.data = x.data * 2
# weight_data
build:
    M = nn.Linear(8, 8)
forward:
    M.weight.data.clamp_(-0.4, 0.4)
    x = M(x)
# autocast
build:
    M = nn.Linear(8, 8)
forward:
    with torch.autocast("cpu", torch.bfloat16):
        x = M(x) @ x.mT @ x / 64
    x = x.float()
# no_autocast
build:
    M = nn.LayerNorm(8)
forward:
    with torch.autocast("cpu", enabled=False):
        x = M(x.float())
# generator
build:
    M = Generators()
forward:
    x = x * torch.rand(x.shape, generator=M.own)
# rng_put_back
forward:
    a = torch.get_rng_state()
    x = x + torch.rand_like(x) * 0.1
    torch.set_rng_state(a)
# forked_rng
forward:
    with torch.random.fork_rng():
        x = F.dropout(x, 0.4)
# numpy_copied
forward:
    x = x + torch.from_numpy(np.sin(x.detach().numpy()))
# numpy_shared
forward:
    a = np.ones(8, np.float32)
    x = x * torch.from_numpy(a)
    a[:] = 7
# numpy_kept
build:
    M = Buffers()
forward:
    M.array[:] = M.array * 0.5 + 1
    x = x * torch.from_numpy(M.array)
# numpy_writes
forward:
    a = x.detach().clone()
    a.numpy()[:, 0] = 3
    x = x + a
# dlpack
forward:
    a = torch.from_dlpack(x.detach().clone())
    x = x + a.cos()
# frombuffer
build:
    M_a = bytearray(32)
forward:
    x = x + torch.frombuffer(M_a, dtype=torch.float32)
# shared
build:
    M = nn.Linear(8, 8)
    M.weight.share_memory_()
forward:
    x = M(x)
# subclass
forward:
    x = (x.as_subclass(Sub) * 2).sin().as_subclass(torch.Tensor)
# subclass_writes
forward:
    x = x.exp().clamp(max=3)
    x.as_subclass(Sub).mul_(0.5)
# listed
build:
    M = nn.Linear(8, 8)
forward:
    x = torch.stack([M(each) for each in x]) * torch.tensor(x.detach().mean((0, 1)).tolist())
# item
forward:
    x = x / (1 + abs(x[0, 0, 0].item()))
# printed
forward:
    a = repr(x.detach())
    x = x + len(a) * 1e-4
# deep_copied
forward:
    x = x + copy.deepcopy(x.detach()).tanh()
# pickled
forward:
    x = x * pickle.loads(pickle.dumps(x.detach().cos()))
# resized
forward:
    a = torch.empty(0)
    torch.add(x.detach(), 1, out=a)
    x = x * a
# set_
forward:
    a = torch.empty(0).set_(x.detach().clone().untyped_storage(), 0, (8,))
    x = x + a
# function_mode
forward:
    with Counted():
        x = x.sin() + x.cos()
# threaded
build:
    M = nn.Linear(8, 8)
forward:
    a = in_thread(lambda: x.detach().exp().mean().item())
    x = M(x) / (1 + a)
# collected
forward:
    a = [x.exp()]
    a.append(a)
    del a
    gc.collect()
    x = x.sin()
# spoilt
forward:
    with torch.enable_grad():
        a = x.detach().requires_grad_()
        b = a.exp()
        c = b.sum()
        b.detach().mul_(2)
    try:
        (a,) = torch.autograd.grad(c, a)
        x = x + a
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        x = x.tanh()
# failing
forward:
    try:
        x @ torch.ones(3, 3)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        x = x.tanh()
# too_much
forward:
    try:
        torch.empty(1 << 46)
    except (MemoryError, RuntimeError):
        x = x.sin()
# not_definite
forward:
    try:
        torch.linalg.cholesky(-x.mT @ x - torch.eye(8))
    except torch.linalg.LinAlgError:
        x = x.cos()
""")
