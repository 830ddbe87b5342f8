"""Kinds of training loops for random programs: each defines one step.

The module `loop` replaces the lines that begin with @. @batch assigns `x` and `target`. @forward is
`y = net(x)`. @loss assigns `loss`. @backward is `loss.backward()`. @after is what a habit does with
the gradients before @update. @update is `optimizer.step()` and the lines after it.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.pytorch.hunt.table import table


class Driver(NamedTuple):
    step: str
    setup: str = ""


_ROWS = table("""
# plain
step:
    @batch
    @forward
    @loss
    @backward
    @after
    @update
# accumulating
step:
    for _ in range(3):
        @batch
        @forward
        @loss
        loss = loss / 3
        @backward
    @after
    @update
# sum of losses
step:
    losses = []
    for _ in range(2):
        @batch
        @forward
        @loss
        losses.append(loss)
    loss = sum(losses)
    @backward
    @after
    @update
    del losses
# example by example
step:
    @batch
    whole, wanted = x, target
    for x, target in zip(whole.split(2), wanted.split(2)):
        @forward
        @loss
        @backward
    @after
    @update
# adversaries
step:
    @batch
    @forward
    judged = critic(target).mean() - critic(y.detach()).mean()
    judged.backward()
    critics.step()
    critics.zero_grad()
    for p in critic.parameters():
        p.data.clamp_(-0.3, 0.3)
    loss = -critic(y).mean()
    @backward
    @after
    @update
    critics.zero_grad()
    note(judged)
setup:
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
    critics = torch.optim.RMSprop(critic.parameters(), 0.01)
# adversaries with penalty
step:
    @batch
    with torch.no_grad():
        y = net(x)
    mixed = torch.lerp(target, y, torch.rand(x.shape[0], 1, 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    judged = critic(y).mean() - critic(target).mean() + (slope.norm(2, -1) - 1).square().mean()
    judged.backward()
    critics.step()
    critics.zero_grad()
    @forward
    for p in critic.parameters():
        p.requires_grad_(False)
    loss = -critic(y).mean()
    @backward
    for p in critic.parameters():
        p.requires_grad_(True)
    @after
    @update
setup:
    critic = nn.Sequential(
        nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1)
    )
    critics = torch.optim.Adam(critic.parameters(), 0.01, betas=(0.0, 0.9))
# rollout
step:
    losses = []
    observed[:] = rng.random(observed.shape)
    for _ in range(3):
        x = torch.tensor(observed) if copied else torch.from_numpy(observed) + 0
        @forward
        choices = torch.distributions.Categorical(logits=y.mean(1))
        action = choices.sample()
        observed[:] = observed * 0.9 + action.numpy()[:, None, None] * 0.1
        reward = torch.as_tensor(observed.mean((1, 2)))
        losses.append(
            -(choices.log_prob(action) * reward).mean() - 0.01 * choices.entropy().mean()
        )
    loss = torch.stack(losses).sum()
    @backward
    @after
    @update
    del losses, choices
setup:
    observed = np.zeros((6, 8, 8), np.float32)
    copied = True
# rollout from a buffer
step:
    losses = []
    observed[:] = rng.random(observed.shape)
    for _ in range(3):
        x = torch.from_numpy(observed) + 0
        @forward
        action = y.detach().mean((1, 2)).numpy()
        observed[:] = observed * 0.9 + action[:, None, None] * 0.1
        losses.append(y.square().mean())
    loss = torch.stack(losses).sum()
    @backward
    @after
    @update
    del losses
setup:
    observed = np.zeros((6, 8, 8), np.float32)
# replayed
step:
    with torch.no_grad():
        for t in range(3):
            @batch
            stored[t], before[t] = x, net(x).mean((1, 2))
    chosen = torch.randperm(18).view(2, 9)
    for indices in chosen:
        x = stored.view(18, 8, 8)[indices]
        @forward
        ratio = (y.mean((1, 2)) - before.view(-1)[indices]).exp()
        loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()
        @backward
        @after
        @update
setup:
    stored, before = torch.zeros(3, 6, 8, 8), torch.zeros(3, 6)
# closure
step:
    @batch
    def closure():
        optimizer.zero_grad()
        @forward
        @loss
        @backward
        @after
        return loss
    loss = optimizer.step(closure)
setup:
    optimizer = torch.optim.LBFGS(parameters(net), lr=0.1, max_iter=3, history_size=2)
# line search
step:
    @batch
    def closure():
        optimizer.zero_grad()
        @forward
        @loss
        @backward
        return loss
    loss = optimizer.step(closure)
setup:
    optimizer = torch.optim.LBFGS(parameters(net), max_iter=2, line_search_fn="strong_wolfe")
# sharpness
step:
    @batch
    @forward
    @loss
    @backward
    with torch.no_grad():
        moved = [
            (p, 0.05 * p.grad / (p.grad.norm() + 1e-6))
            for p in parameters(net)
            if p.grad is not None
        ]
        for p, way in moved:
            p.add_(way)
    optimizer.zero_grad()
    @forward
    @loss
    @backward
    with torch.no_grad():
        for p, way in moved:
            p.sub_(way)
    @after
    @update
    del moved
# backpropagation truncated
step:
    @batch
    @forward
    if carried is not None and carried.shape[1] != y.shape[0]:
        carried = None
    y, carried = memory(y, carried)
    @loss
    @backward
    carried = carried.detach()
    @after
    @update
    grown.step()
    grown.zero_grad()
setup:
    memory = nn.GRU(8, 8, batch_first=True)
    grown = torch.optim.Adam(memory.parameters(), 0.01)
    carried = None
# backpropagation truncated twice
step:
    @batch
    @forward
    if carried is not None and carried[0].shape[0] != y.shape[0]:
        carried = None
    loss = 0
    for part in y.unbind(1):
        carried = memory(part, carried)
        loss = loss + (carried[0] - target[:, 0]).square().mean()
    @backward
    carried = tuple(part.detach_() for part in carried)
    @after
    @update
    grown.step()
    grown.zero_grad()
setup:
    memory = nn.LSTMCell(8, 8)
    grown = torch.optim.SGD(memory.parameters(), 0.05, momentum=0.9)
    carried = None
# learning to learn
step:
    @batch
    fast = dict(net.named_parameters())
    for _ in range(2):
        inner = F.mse_loss(functional_call(net, fast, (x,)), target)
        found = torch.autograd.grad(
            inner, list(fast.values()), create_graph=True, allow_unused=True
        )
        fast = {
            name: w if g is None else w - 0.05 * g for (name, w), g in zip(fast.items(), found)
        }
    y = functional_call(net, fast, (x,))
    @loss
    @backward
    del fast, found, inner
    @after
    @update
# teacher that follows
step:
    @batch
    @forward
    with torch.no_grad():
        shown = teacher(x + 0.1 * torch.randn_like(x)).mean(1)
    known = F.normalize(torch.cat([shown, queue]), dim=-1)
    loss = F.cross_entropy(F.normalize(y.mean(1), dim=-1) @ known.t() / 0.2, torch.arange(len(x)))
    @backward
    @after
    @update
    with torch.no_grad():
        for mine, its in zip(teacher.parameters(), net.parameters()):
            mine.mul_(0.9).add_(its, alpha=0.1)
        queue = torch.cat([shown, queue])[:12]
setup:
    teacher = copy.deepcopy(net).requires_grad_(False)
    queue = torch.randn(12, 8)
# distilled
step:
    @batch
    @forward
    with torch.inference_mode():
        wanted = teacher(x)
    loss = F.kl_div(y.log_softmax(-1), wanted.clone().softmax(-1), reduction="batchmean")
    @backward
    @after
    @update
setup:
    teacher = copy.deepcopy(net).eval()
# without an optimizer
step:
    @batch
    @forward
    @loss
    @backward
    @after
    with torch.no_grad():
        for p in parameters(net):
            if p.grad is not None:
                p -= 0.02 * p.grad
                p.grad = None
# gradients by hand
step:
    @batch
    @forward
    @loss
    found = torch.autograd.grad(loss, parameters(net), allow_unused=True)
    for p, g in zip(parameters(net), found):
        p.grad = g
    del found
    @after
    @update
# its own results
step:
    @batch
    losses = 0
    for _ in range(3):
        @forward
        @loss
        losses = losses + loss
        x = torch.cat([x[:, 1:], y[:, -1:]], 1)
    loss = losses
    @backward
    @after
    @update
    del losses
# attacked
step:
    @batch
    clean = x
    moved = torch.zeros_like(x).uniform_(-0.1, 0.1)
    for _ in range(2):
        x = (clean + moved).requires_grad_()
        y = net(x)
        @loss
        (way,) = torch.autograd.grad(loss, x)
        moved = (moved + 0.05 * way.sign()).clamp_(-0.1, 0.1)
    x = clean + moved
    @forward
    @loss
    @backward
    @after
    @update
# gradients clipped one by one
step:
    @batch
    whole, wanted = x, target
    summed = [torch.zeros_like(p) for p in parameters(net)]
    for i in range(3):
        x, target = whole[2 * i : 2 * i + 2], wanted[2 * i : 2 * i + 2]
        @forward
        @loss
        @backward
        nn.utils.clip_grad_norm_(parameters(net), 1.0)
        for s, p in zip(summed, parameters(net)):
            if p.grad is not None:
                s += p.grad
        optimizer.zero_grad()
    for s, p in zip(summed, parameters(net)):
        p.grad = s + 0.01 * torch.randn_like(s)
    @after
    @update
    del summed
# two optimizers
step:
    @batch
    for part in halves if step % 2 else halves[::-1]:
        @forward
        @loss
        @backward
        @after
        part.step()
        net.zero_grad()
setup:
    halves = [
        torch.optim.Adam(parameters(net)[:2], 0.01),
        torch.optim.SGD(
            parameters(net)[1:] or parameters(net), 0.02, momentum=0.8, nesterov=True
        ),
    ]
# autoencoder
step:
    @batch
    @forward
    mean, spread = middle(y).chunk(2, -1)
    drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
    loss = (
        F.binary_cross_entropy_with_logits(out(drawn), target.sigmoid())
        - 0.05 * (1 + spread - mean.square() - spread.exp()).mean()
    )
    @backward
    @after
    @update
    side.step()
    side.zero_grad()
setup:
    middle, out = nn.Linear(8, 8), nn.Linear(4, 8)
    side = torch.optim.Adamax([*middle.parameters(), *out.parameters()], 0.01)
# mixed up
step:
    @batch
    share = float(rng.beta(0.4, 0.4))
    order = torch.randperm(len(x))
    x, target = share * x + (1 - share) * x[order], share * target + (1 - share) * target[order]
    @forward
    @loss
    @backward
    @after
    @update
# hard examples
step:
    @batch
    with torch.no_grad():
        net.eval()
        worst = (net(x) - target).square().mean((1, 2)).topk(4).indices
        net.train()
    x, target = x[worst], target[worst]
    @forward
    @loss
    @backward
    @after
    @update
# denoising
step:
    @batch
    times = torch.randint(0, 10, (len(x),))
    noise = torch.randn_like(x)
    kept = torch.linspace(0.9, 0.1, 10).cumprod(0)[times].view(-1, 1, 1)
    x = kept.sqrt() * x + (1 - kept).sqrt() * noise
    @forward
    loss = F.mse_loss(y, noise)
    @backward
    @after
    @update
""")

DRIVERS = {name: Driver(**slots) for name, slots in _ROWS.items()}
