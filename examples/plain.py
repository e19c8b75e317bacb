"""A plain loop: handwritten digits, a small network. The lines that make it a learner are marked.

    python -m yeto_torch.run --learners 2 total_steps=80 -- examples/plain.py

Needs scikit-learn for the data. An argument is the number of passes over the data; without one the fleet decides.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from yeto_torch import YetoOuterOptimizer

learner, learners = int(os.environ["YETO_LEARNER_ID"]), int(os.environ["YETO_LEARNERS"])
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
test_images, test_labels = images[1500:], labels[1500:]
images, labels = images[learner:1500:learners], labels[learner:1500:learners]  # every learner has its own part

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = YetoOuterOptimizer(optimizer, model, fragments=4)  # 1: waits for the fleet, takes over its weights


def batches():
    """Indices, 32 at a time, `epochs` times over."""
    for _ in range(epochs):
        yield from torch.randperm(len(labels)).split(32)


for batch in batches():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()
    if optimizer.finished:  # 2: the fleet has ended before the data
        break
optimizer.finish()  # 3: the data may have ended before the fleet: answers until it has ended too

accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
print(f"final model, {100 * accuracy:.1f} % of unseen digits; {optimizer.stats.merges} broadcasts taken over")
out = Path(os.environ.get("YETO_RUN_DIR", "."), f"learner-{learner}")
out.mkdir(exist_ok=True)
save_file(model.state_dict(), out / "model.safetensors")
