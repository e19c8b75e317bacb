"""An Accelerate loop with gradient accumulation and a schedule: handwritten digits, a small network.

    python -m yeto_torch.run --learners 2 total_steps=80 -- examples/accelerate_loop.py

Needs accelerate and scikit-learn. An argument is the number of passes over the data; without one the fleet decides.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import LambdaLR

from yeto_torch import YetoOuterOptimizer

learner, learners = int(os.environ["YETO_LEARNER_ID"]), int(os.environ["YETO_LEARNERS"])
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
test_images, test_labels = images[1500:], labels[1500:]
mine = torch.utils.data.TensorDataset(images[learner:1500:learners], labels[learner:1500:learners])
loader = torch.utils.data.DataLoader(mine, batch_size=16, shuffle=True)

accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
model = accelerator.prepare(model)
# Wrap first, prepare then; `yeto` stays at hand, since the prepared optimizer hides what it does not know.
yeto = YetoOuterOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model, fragments=4)
scheduler = LambdaLR(yeto, lambda step: min(1.0, (step + 1) / 20))
optimizer, scheduler, loader = accelerator.prepare(yeto, scheduler, loader)


def batches():
    """The data, `epochs` times over."""
    for _ in range(epochs):
        yield from loader


for inputs, targets in batches():
    with accelerator.accumulate(model):
        yeto.count_tokens(len(targets))  # adds up over the micro-batches of a step
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        scheduler.step()  # like the optimizer's: only where a step was made
        optimizer.zero_grad()
    if yeto.finished:  # the fleet has ended before the data
        break
yeto.finish()  # the data may have ended before the fleet: answers until it has ended too

model = accelerator.unwrap_model(model)
accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
print(f"final model, {100 * accuracy:.1f} % of unseen digits; {yeto.stats.merges} broadcasts taken over")
out = Path(os.environ.get("YETO_RUN_DIR", "."), f"learner-{learner}")
out.mkdir(exist_ok=True)
save_file(model.state_dict(), out / "model.safetensors")
