"""Building blocks without weights, from which the hunt puts together random networks.

The blocks draw random numbers, write in place, index, sum over time, or do linear algebra. (The
hunt is a random search for programs that give other results within a budget.)
"""

from __future__ import annotations

from tests.pytorch.hunt.table import table

OPERATIONS = table("""
# dropout
build:
    M = nn.Dropout(0.3)
forward:
    x = M(x)
# dropout_inplace
build:
    M = nn.Dropout(0.3, inplace=True)
forward:
    x = M(x * 1.0)
# dropout1d
build:
    M = nn.Dropout1d(0.3)
forward:
    x = M(x)
# alpha_dropout
build:
    M = nn.AlphaDropout(0.2)
forward:
    x = M(x)
# feature_alpha
build:
    M = nn.FeatureAlphaDropout(0.2)
forward:
    x = M(x)
# drop_path
forward:
    x = x + x.tanh() * torch.empty(x.shape[0], 1, 1).bernoulli_(0.7) if self.training else x
# rrelu
build:
    M = nn.RReLU()
forward:
    x = M(x)
# noise
forward:
    x = x + 0.1 * torch.randn_like(x)
# gumbel
forward:
    x = x * F.gumbel_softmax(x, hard=True)
# sampled
forward:
    a = torch.multinomial(x.softmax(-1).view(-1, 8), 1)
    x = x + F.one_hot(a, 8).view_as(x)
# relu_inplace
build:
    M = nn.ReLU(inplace=True)
forward:
    x = M(x + 0.1)
# elu_
forward:
    x = F.elu_(x * 2)
# leaky_
forward:
    x = x.clone()
    F.leaky_relu_(x, 0.2)
# hardtanh_
build:
    M = nn.Hardtanh(-2, 2, inplace=True)
forward:
    x = M(1.5 * x)
# silu_
forward:
    x = F.silu(x - 0.5, inplace=True)
# sigmoid_
forward:
    x = (x + 1).sigmoid_()
# tanh
forward:
    x = x.tanh()
# softplus
forward:
    x = F.softplus(x).log1p()
# glu
forward:
    x = F.glu(torch.cat([x, x.flip(-1)], -1), -1)
# geglu
forward:
    a, b = torch.cat([x, x + 1], -1).chunk(2, -1)
    x = F.gelu(a, approximate="tanh") * b
# add_
forward:
    x = x.sin()
    x += 1
    x.mul_(0.5)
# slices_written
forward:
    x = x * 2
    x[:, 0] = x[:, -1].exp()
    x[..., 1:3] *= 0.5
# view_written
forward:
    x = x.cos()
    a = x.view(-1)
    a.mul_(2).sub_(1)
# chunks_written
forward:
    x = x + 1
    a, b = x[..., :4], x[..., 4:].clone()
    a *= b
# out_written
forward:
    x = x + 0
    with torch.no_grad():
        a = torch.empty_like(x)
        torch.exp(x.clamp(max=1), out=a)
    x = x * a
# foreach
forward:
    x = sum(torch._foreach_mul([x, x.tanh()], [0.5, 0.25]))
# gathered
forward:
    x = x.gather(1, x.argsort(1))
# topk
forward:
    a, b = x.topk(4, -1)
    x = torch.zeros_like(x).scatter(-1, b, a)
# scatter_add
forward:
    x = torch.zeros_like(x).scatter_add_(1, x.argsort(1), x) + x
# scatter_reduce
forward:
    x = x.scatter_reduce(1, x.argsort(1), x.exp(), "amax")
# indexed
forward:
    x = x[torch.randperm(x.shape[0])] + x[:, torch.arange(x.shape[1]).flip(0)]
# index_add
forward:
    x = x.index_add(1, torch.zeros(x.shape[1], dtype=torch.long), x, alpha=0.1)
# selected
forward:
    x = torch.index_select(x, 2, torch.tensor([7, 6, 5, 4, 3, 2, 1, 0]))
# masked_select
forward:
    a = x > 0
    x = torch.zeros_like(x).masked_scatter(a, x[a].tanh())
# where
forward:
    x = torch.where(x > 0, x.log1p(), x * 0.5).nan_to_num()
# put
forward:
    x = x.clone()
    x.index_put_((torch.tensor([0, 0]),), x[2:4].detach().tanh(), accumulate=True)
# complex
forward:
    x = (
        torch.view_as_real(
            torch.view_as_complex(x.reshape(*x.shape[:2], 4, 2)).exp().conj().resolve_conj()
        )
        .flatten(2)
        .tanh()
    )
# fourier
forward:
    x = torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.9, n=x.shape[1], dim=1)
# mixed_tokens
forward:
    x = x + torch.fft.fft2(x).real * 0.1
# rotary
forward:
    a = torch.polar(
        torch.ones(x.shape[1], 4), torch.outer(torch.arange(x.shape[1]).float(), torch.rand(4))
    )
    x = torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:2], 4, 2)) * a).flatten(2)
# expanded
forward:
    x = x + x.mean(1, keepdim=True).expand_as(x)
    a = x[:, :1].expand(-1, 3, -1)
    x = x * a.sum(1, keepdim=True).sigmoid()
# strided
forward:
    x = x.as_strided(x.size(), x.stride()) + x.transpose(1, 2).contiguous().transpose(1, 2)
# split
forward:
    a, b, c = x.split([2, 2, 4], -1)
    x = torch.cat([c, a.exp().clamp(max=2), b.square()], -1)
# unbound
forward:
    x = torch.stack([each.tanh() * i for i, each in enumerate(x.unbind(-1))], -1)
# dense
forward:
    a = [x]
    for _ in range(3):
        a.append(torch.cat(a, -1).unflatten(-1, (-1, 8)).sum(-2).tanh())
    x = a[-1]
# skip
forward:
    a = F.avg_pool1d(x.mT, 2, ceil_mode=True).mT.relu()
    x = x + F.interpolate(a.mT, size=x.shape[1]).mT
# cumsum
forward:
    x = x.cumsum(1) / x.shape[1]
# cumprod
forward:
    x = (1 + 0.1 * x.tanh()).cumprod(1)
# cummax
forward:
    x = x + x.cummax(1).values
# logcumsumexp
forward:
    x = x.logcumsumexp(1)
# einsum
forward:
    x = torch.einsum("btd,bsd,bse->bte", x, x, x) / 64
# bmm
forward:
    x = torch.bmm(torch.bmm(x, x.mT).softmax(-1), x)
# baddbmm
forward:
    x = torch.baddbmm(x, x @ x.mT, x, alpha=0.01)
# interpolated
forward:
    x = F.interpolate(x.unsqueeze(1), scale_factor=2, mode="bilinear")[:, 0, ::2, ::2]
# unfold
forward:
    x = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).amax(-1)
# folded
forward:
    a = F.unfold(x.unsqueeze(1), 3, padding=1)
    x = F.fold(a, x.shape[1:], 3, padding=1).squeeze(1) / 9
# max_pool
forward:
    a, b = F.max_pool1d(x, 2, return_indices=True)
    x = F.max_unpool1d(a, b, 2)
# adaptive
forward:
    x = F.adaptive_max_pool1d(x, 8)
# pixels
forward:
    x = (
        F.pixel_unshuffle(
            F.pixel_shuffle(x.reshape(-1, 8, 1, 1)[:, :, :, :].expand(-1, 8, 2, 2)[:, :4], 2), 2
        )
        .mean((-1, -2))
        .repeat(1, 2)
        .view_as(x)
    )
# grid
forward:
    a = F.affine_grid(
        torch.eye(2, 3).expand(x.shape[0], 2, 3) * 0.9,
        (x.shape[0], 1, *x.shape[1:]),
        align_corners=False,
    )
    x = F.grid_sample(x.unsqueeze(1), a, align_corners=False).squeeze(1)
# normalized
forward:
    x = F.normalize(x, dim=-1) + x / x.norm(p=3)
# standard
forward:
    x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 0.1)
# cosine
forward:
    x = x * F.cosine_similarity(x, x.flip(1), dim=-1).unsqueeze(-1)
# sorted
forward:
    x = x.sort(-1).values
# median
forward:
    x = x - x.median(1, keepdim=True).values
# kth
forward:
    x = x + x.kthvalue(2, 1, keepdim=True).values.detach()
# solved
forward:
    a = x.mT @ x / x.shape[1] + torch.eye(8)
    x = torch.linalg.solve(a, x.mT).mT
# cholesky
forward:
    a = x.mT @ x + torch.eye(8)
    x = x + torch.linalg.cholesky(a).mean(1, keepdim=True)
# matrix_exp
forward:
    x = x @ torch.linalg.matrix_exp(x.mT @ x / 64 - torch.eye(8))
# padded
forward:
    x = F.pad(x.mT, (1, 1), mode="reflect")[..., 1:-1].mT
# rolled
forward:
    x = x.roll((1, 2), (1, 2)).flip(0) + x.tril()
# outer
forward:
    x = torch.tensordot(x, torch.outer(x[0, 0], x[0, 1]).tanh(), 1) / 8
# double
forward:
    x = (x.double() * x.double().exp().clamp(max=3)).float()
# bfloat16
forward:
    x = (x.bfloat16() * 2).tanh().float()
# quantized
forward:
    x = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
# straight
forward:
    x = x + (x.round() - x).detach()
# detached
forward:
    x = x * x.detach().sigmoid()
# softmax
forward:
    x = x * F.softmax(x, 1) - F.log_softmax(x, -1) * 0.1
# scored
forward:
    x = x + 0.1 * F.kl_div(x.log_softmax(-1), x.flip(1).softmax(-1), reduction="none")
# entropy
forward:
    x = x * F.cross_entropy(x.reshape(-1, 8), x.reshape(-1, 8).argmin(-1), label_smoothing=0.1)
# vmapped
forward:
    x = torch.vmap(lambda row: row.sin() * row)(x)
# branching
forward:
    x = x * 2 if x.sum().item() > 0 else x.tanh()
""")
