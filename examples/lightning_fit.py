"""Lightning within a budget. python examples/lightning_fit.py"""

import lightning
import torch

from rekindle.integrations.lightning import Budget


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(12)
        ]
        self.network = torch.nn.Sequential(*blocks)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.network(x) - x).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
data = torch.utils.data.TensorDataset(torch.randn(4096, 256))
budget = Budget("32MiB")
trainer = lightning.Trainer(
    max_epochs=1,
    callbacks=[budget],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Autoencoder(), torch.utils.data.DataLoader(data, batch_size=1024))

print(budget.run.report())
