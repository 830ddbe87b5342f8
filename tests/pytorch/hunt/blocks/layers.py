"""Blocks of random networks with weights: layers, cells, attention, mixtures of experts."""

from __future__ import annotations

from tests.pytorch.hunt.table import table

LAYERS = table("""
# linear
build:
    M = nn.Linear(8, 8)
forward:
    x = M(x)
# perceptron
build:
    M = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
forward:
    x = x + M(x)
# bilinear
build:
    M = nn.Bilinear(8, 8, 8)
forward:
    x = M(x, x.tanh())
# tied
build:
    M = nn.Linear(8, 8)
forward:
    x = F.linear(M(x).tanh(), M.weight.t())
# low_rank
build:
    M = nn.Parameter(torch.randn(8, 2) / 4)
    M_b = nn.Parameter(torch.zeros(2, 8))
forward:
    x = x + x @ M @ M_b
# conv1d
build:
    M = nn.Conv1d(8, 8, 3, padding=1)
forward:
    x = M(x.mT).mT
# depthwise
build:
    M = nn.Conv1d(8, 8, 3, padding="same", groups=8)
forward:
    x = M(x.mT).mT.contiguous()
# conv2d
build:
    M = nn.Conv2d(1, 2, 3, padding=1)
forward:
    x = M(x.unsqueeze(1)).mean(1)
# transposed
build:
    M = nn.ConvTranspose1d(8, 8, 3, padding=1)
forward:
    x = M(x.mT).mT
# circular
build:
    M = nn.Conv1d(8, 8, 3, padding=1, padding_mode="circular")
forward:
    x = M(x.mT).mT
# batch_norm
build:
    M = nn.BatchNorm1d(8)
forward:
    x = M(x.mT).mT
# batch_norm2
build:
    M = nn.BatchNorm2d(2, momentum=None)
forward:
    x = M(torch.stack([x, -x], 1))[:, 0]
# instance_norm
build:
    M = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
forward:
    x = M(x.mT).mT
# layer_norm
build:
    M = nn.LayerNorm(8)
forward:
    x = M(x)
# group_norm
build:
    M = nn.GroupNorm(2, 8)
forward:
    x = M(x.mT).mT
# rms_norm
build:
    M = nn.RMSNorm(8)
forward:
    x = M(x)
# local_norm
build:
    M = nn.LocalResponseNorm(3)
forward:
    x = M(x.mT).mT
# attention
build:
    M = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
forward:
    x = x + M(x, x, x)[0]
# attention_fast
build:
    M = nn.MultiheadAttention(8, 2, batch_first=True)
forward:
    x = M(x, x, x, need_weights=False)[0]
# encoder
build:
    M = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
forward:
    x = M(x)
# decoder
build:
    M = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
forward:
    x = M(x, x.flip(1))
# causal
build:
    M = nn.Linear(8, 24)
forward:
    a, b, c = M(x).chunk(3, -1)
    x = F.scaled_dot_product_attention(a, b, c, is_causal=True)
# masked
build:
    M = nn.Linear(8, 16)
forward:
    a, b = M(x).split(8, -1)
    c = (a @ b.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9)
    x = c.softmax(-1) @ x
# linear_attention
build:
    M = nn.Linear(8, 8)
forward:
    a = F.elu(M(x)) + 1
    x = torch.einsum("btd,bde->bte", a, torch.einsum("btd,bte->bde", a, x)) / x.shape[1]
# embedding
build:
    M = nn.Embedding(9, 8)
forward:
    x = x + M(x.argmax(-1))
# embedding_sparse
build:
    M = nn.Embedding(9, 8, sparse=True)
forward:
    x = x + M(x.argmax(-1))
# embedding_norm
build:
    M = nn.Embedding(9, 8, max_norm=1.0, padding_idx=0)
forward:
    x = x * M(x.argmin(-1))
# embedding_often
build:
    M = nn.Embedding(9, 8, scale_grad_by_freq=True)
forward:
    x = x + M(x.argmax(-1))
# embedding_bag
build:
    M = nn.EmbeddingBag(9, 8, mode="max")
forward:
    x = x + M(x.argmax(-1)).unsqueeze(1)
# positions
build:
    M = nn.Embedding(64, 8)
forward:
    x = x + M(torch.arange(x.shape[1]))
# lstm
build:
    M = nn.LSTM(8, 8, batch_first=True)
forward:
    x, _ = M(x)
# lstm_deep
build:
    M = nn.LSTM(8, 4, 2, dropout=0.3, bidirectional=True, batch_first=True)
forward:
    x = M(x)[0]
# gru
build:
    M = nn.GRU(8, 8, batch_first=True)
forward:
    x, a = M(x)
# rnn
build:
    M = nn.RNN(8, 8, nonlinearity="relu")
forward:
    x = M(x.transpose(0, 1))[0].transpose(0, 1)
# packed
build:
    M = nn.LSTM(8, 8, batch_first=True)
forward:
    a = nn.utils.rnn.pack_padded_sequence(
        x, [x.shape[1] - i % 2 for i in range(x.shape[0])], batch_first=True, enforce_sorted=False
    )
    x = nn.utils.rnn.pad_packed_sequence(M(a)[0], batch_first=True, total_length=x.shape[1])[0]
# gru_cell
build:
    M = nn.GRUCell(8, 8)
forward:
    a, b = torch.zeros_like(x[:, 0]), []
    for each in x.unbind(1):
        a = M(each, a)
        b.append(a)
    x = torch.stack(b, 1)
# lstm_cell
build:
    M = nn.LSTMCell(8, 8)
forward:
    a = None
    for i in range(min(4, x.shape[1])):
        a = M(x[:, i], a)
    x = x + a[0].unsqueeze(1) * a[1].unsqueeze(1)
# spectral
build:
    M = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
forward:
    x = M(x)
# spectral_old
build:
    M = nn.utils.spectral_norm(nn.Linear(8, 8))
forward:
    x = M(M(x))
# weight_norm
build:
    M = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
forward:
    x = M(x)
# weight_norm_old
build:
    M = nn.utils.weight_norm(nn.Linear(8, 8))
forward:
    x = M(x)
# orthogonal
build:
    M = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8, bias=False))
forward:
    x = M(x)
# pruned
build:
    M = nn.utils.prune.random_unstructured(nn.Linear(8, 8), "weight", 0.5)
forward:
    x = M(x)
# symmetric
build:
    M = nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(M, "weight", Symmetric())
forward:
    x = M(x)
# cached_weight
build:
    M = nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(M, "weight", Symmetric())
forward:
    with nn.utils.parametrize.cached():
        x = M(M(x))
# experts
build:
    M = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    M_gate = nn.Linear(8, 3)
forward:
    a, b = M_gate(x).softmax(-1).topk(2, -1)
    c = torch.zeros_like(x)
    for i, each in enumerate(M):
        r, t, k = (b == i).nonzero(as_tuple=True)
        c.index_put_((r, t), each(x[r, t]) * a[r, t, k].unsqueeze(-1), accumulate=True)
    x = c
# experts_sorted
build:
    M = nn.Parameter(torch.randn(3, 8, 8) / 3)
    M_gate = nn.Linear(8, 3)
forward:
    a = x.reshape(-1, 8)
    b = M_gate(a).argmax(-1).sort()
    c = torch.bincount(b.values, minlength=3).tolist()
    d = torch.cat([e @ w for e, w in zip(a[b.indices].split(c), M)])
    x = torch.empty_like(d).index_copy(0, b.indices, d).view_as(x)
# adapted
build:
    M = nn.Linear(8, 8).requires_grad_(False)
    M_a = nn.Linear(8, 2, bias=False)
    M_b = nn.Linear(2, 8, bias=False)
forward:
    x = M(x) + M_b(M_a(F.dropout(x, 0.1, self.training)))
# film
build:
    M = nn.Linear(8, 16)
forward:
    a, b = M(x.mean(1, keepdim=True)).chunk(2, -1)
    x = torch.addcmul(b, x, a)
# squeezed
build:
    M = nn.Linear(8, 8)
forward:
    x = x * M(F.adaptive_avg_pool1d(x.mT, 1).squeeze(-1)).sigmoid().unsqueeze(1)
# prelu
build:
    M = nn.PReLU(8)
forward:
    x = M(x.mT).mT
# scale
build:
    M = nn.Parameter(torch.ones(()))
forward:
    x = x * M
# highway
build:
    M = nn.Linear(8, 8)
forward:
    a = M(x).sigmoid()
    x = torch.lerp(x, x.tanh(), a)
# mixture
build:
    M = nn.Parameter(torch.randn(4, 8))
forward:
    x = torch.logsumexp(-torch.cdist(x, M), -1, keepdim=True) + x
# state_space
build:
    M = nn.Parameter(torch.rand(8))
forward:
    a, b = x[:, 0], []
    for i in range(x.shape[1]):
        a = a * M + x[:, i]
        b += [a]
    x = torch.stack(b, 1)
# scripted
build:
    M = scripted_gelu
forward:
    x = M(x)
# custom_op
forward:
    x = torch.ops.hunt.halve(x)
""")
