"""Train a LightningModule with validation, a learning rate schedule, metrics and checkpoints."""

import sys
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

warnings.filterwarnings("ignore")


class Data(pl.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(512, 64, generator=generator)
        y = torch.randint(10, (512,), generator=generator)
        self.parts = random_split(TensorDataset(x, y), [384, 128], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=192, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=128)


class LitClassifier(pl.LightningModule):
    def __init__(self, width=96, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        layers = [
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)
        ]
        self.net = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    pl.seed_everything(7)
    best = ModelCheckpoint(dirpath="checkpoints", monitor="val_loss", filename="best")
    trainer = pl.Trainer(
        max_epochs=int(sys.argv[1]),
        accelerator="cpu",
        logger=CSVLogger(".", name="logs"),
        callbacks=[best, EarlyStopping("val_loss", patience=3)],
        gradient_clip_val=1.0,
        accumulate_grad_batches=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        barebones=False,
    )
    module = LitClassifier()
    trainer.fit(module, datamodule=Data())
    trainer.validate(module, datamodule=Data(), ckpt_path="best")
    print(f"best {best.best_model_score:.6f} of {trainer.global_step} steps")
    torch.save(module.state_dict(), "weights.pt")
    sys.exit(3 if best.best_model_score > 100 else 0)
