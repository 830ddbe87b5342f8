"""Train an image model with mixup, autocast, gradient scaling and clipping, like timm.

It also accumulates gradients, averages weights, and writes a summary and the best checkpoint.
"""

import argparse
import copy
import csv
import logging
import os
import sys
from collections import OrderedDict

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
logger = logging.getLogger("train")

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("-b", "--batch-size", type=int, default=32)
parser.add_argument("--grad-accum-steps", type=int, default=2)
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--mixup", type=float, default=0.2)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--log-interval", type=int, default=3)
parser.add_argument("--resume", default="")


class Pictures(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 24, 24, generator=generator), index % 10


class Block(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.down = nn.Conv2d(width, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        shortcut = self.down(x)
        x = self.act(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += shortcut
        return self.act(x)


class ResNet(nn.Sequential):
    def __init__(self):
        blocks = [Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1)]
        stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1))
        super().__init__(stem, *blocks, head, nn.Linear(16, 10))


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema, now in zip(
            self.module.state_dict().values(), model.state_dict().values(), strict=True
        ):
            ema.copy_(self.decay * ema + (1.0 - self.decay) * now)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, scaler, ema):
    losses = AverageMeter()
    model.train()
    optimizer.zero_grad()
    for number, (x, y) in enumerate(loader):
        if args.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        target = nn.functional.one_hot(y, 10).float()
        share = torch.distributions.Beta(args.mixup, args.mixup).sample()
        x, target = x.lerp(x.flip(0), share), target.lerp(target.flip(0), share)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):
            loss = loss_fn(model(x), target) / args.grad_accum_steps
        scaler.scale(loss).backward()
        losses.update(loss.item() * args.grad_accum_steps, x.size(0))
        if (number + 1) % args.grad_accum_steps == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            ema.update(model)
        if number % args.log_interval == 0:
            rate = optimizer.param_groups[0]["lr"]
            logger.info(f"Train: {epoch} [{number:>3d}]  Loss: {losses.avg:.5f}  LR: {rate:.3e}")
    return OrderedDict([("loss", losses.avg)])


def validate(model, loader, loss_fn):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.inference_mode():
        for x, y in loader:
            out = model(x)
            right = (out.argmax(dim=1) == y).float().mean()
            losses.update(loss_fn(out, y).item(), x.size(0))
            top1.update(right.item(), x.size(0))
    return OrderedDict([("loss", losses.avg), ("top1", 100 * top1.avg)])


def main():
    args = parser.parse_args()
    torch.manual_seed(42)
    loader = DataLoader(
        Pictures(256), args.batch_size, shuffle=True, num_workers=args.workers, drop_last=True
    )
    eval_loader = DataLoader(Pictures(64), args.batch_size // 4)
    model = ResNet()
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    logger.info(f"Model created, param count: {sum(p.numel() for p in model.parameters())}")
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp)
    ema, best, first = ModelEma(model, 0.9), None, 0
    if args.resume:
        state = torch.load(args.resume)
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    for epoch in range(first, args.epochs):
        loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
        trained = train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, scaler, ema)
        found = validate(ema.module, eval_loader, nn.CrossEntropyLoss())
        scheduler.step()
        with open("summary.csv", "a") as file:
            row = OrderedDict(epoch=epoch, train=trained["loss"], **found)
            writer = csv.DictWriter(file, row.keys())
            if epoch == first:
                writer.writeheader()
            writer.writerow(row)
        state = {"epoch": epoch, "state_dict": model.state_dict()}
        torch.save(state | {"optimizer": optimizer.state_dict()}, "last.pt")
        if best is None or found["loss"] < best:
            best = found["loss"]
            os.replace("last.pt", "weights.pt")
    logger.info(f"*** Best loss: {best:.6f} (epoch {epoch})")


if __name__ == "__main__":
    main()
