"""A LightningModule with offloaded optimizer state: python scripts/examples/lightning_module.py"""

from __future__ import annotations

import lightning
import torch

import offload
from offload.integrations.lightning import OffloadMixin, OffloadMonitor


class Regression(OffloadMixin, lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
        self.masters = offload.cast_compute_weights(self.net, torch.bfloat16)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs.bfloat16()).float(), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.offload_adamw(masters=self.masters, lr=1e-2, mode="wavefront")


def main() -> None:
    lightning.seed_everything(0)
    x = torch.randn(64, 64)
    data = torch.utils.data.TensorDataset(x, x.square().mean(1, keepdim=True))
    trainer = lightning.Trainer(
        max_epochs=2,
        devices=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,  # by the optimizer, exactly
        callbacks=[OffloadMonitor()],  # gradient norm and stage timings, to whatever logger there is
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=2,
    )
    trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=8))
    print({name: round(float(value), 4) for name, value in trainer.logged_metrics.items()})
    trainer.optimizers[0].close()


if __name__ == "__main__":
    main()
