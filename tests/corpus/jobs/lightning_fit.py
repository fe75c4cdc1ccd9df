"""A healthy Lightning fit, two processes over gloo. Arguments: epochs, folder."""

import logging
import sys

import lightning
import torch


class Small(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def training_step(self, batch, _index):
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _index):
        self.log("val_loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    epochs, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    logging.getLogger("lightning").setLevel(logging.DEBUG)
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512, 16)), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=2, strategy="ddp", default_root_dir=folder, log_every_n_steps=1
    )
    trainer.fit(Small(), rows, rows)


if __name__ == "__main__":
    main()
