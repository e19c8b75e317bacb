"""A Lightning Trainer: handwritten digits, a small network.

    python -m yeto_torch.run --learners 2 total_steps=80 -- examples/lightning_module.py

Needs lightning and scikit-learn. An argument is the number of passes over the data; without one the fleet decides.
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from yeto_torch import YetoOuterOptimizer
from yeto_torch.integrations.lightning import YetoCallback

learner, learners = int(os.environ["YETO_LEARNER_ID"]), int(os.environ["YETO_LEARNERS"])
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else -1
out = Path(os.environ.get("YETO_RUN_DIR", "."), f"learner-{learner}")


class Digits(lightning.LightningModule):
    """8 x 8 pixels to ten classes."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    def test_step(self, batch):
        images, labels = batch
        self.log("accuracy", (self.layers(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return YetoOuterOptimizer(optimizer, self, fragments=4)  # 1: here, when the model is complete and on its device


digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train = TensorDataset(images[learner:1500:learners], labels[learner:1500:learners])  # every learner has its own part
test = TensorDataset(images[1500:], labels[1500:])

model = Digits()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=epochs,
    callbacks=[YetoCallback(count=lambda batch: len(batch[1]))],  # 2: ends with the fleet; a digit is a token here
    default_root_dir=out,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
trainer.save_checkpoint(out / "final.ckpt", weights_only=True)  # the final parameters

accuracy = trainer.test(model, DataLoader(test, batch_size=297), verbose=False)[0]["accuracy"]
print(f"final model, {100 * accuracy:.1f} % of unseen digits")
