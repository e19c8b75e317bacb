"""Learners of several processes with FSDP2, each with its shard of the model. The lines for the fleet are marked.

    python -m yeto_torch.run --learners 2 --nproc-per-learner 2 total_steps=80 -- examples/islands/fsdp2.py

or every learner by hand, with YETO_SYNCER, YETO_LEARNER_ID, YETO_LEARNERS and YETO_RUN_ID set:

    torchrun --nproc-per-node 2 examples/islands/fsdp2.py

Needs scikit-learn for the data. Runs on CPUs; for GPUs say "nccl" and "cuda" and move the batches to device LOCAL_RANK.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from yeto_torch import YetoOuterOptimizer

dist.init_process_group("gloo")
learner, learners = int(os.environ["YETO_LEARNER_ID"]), int(os.environ["YETO_LEARNERS"])
part, parts = learner * dist.get_world_size() + dist.get_rank(), learners * dist.get_world_size()

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
test_images, test_labels = images[1500:], labels[1500:]
images, labels = images[part:1500:parts], labels[part:1500:parts]  # every process of every learner has its own part

mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # behind fully_shard: it trains the shards
optimizer = YetoOuterOptimizer(  # 1: the processes of one learner are one process group
    optimizer, model, fragments=4, process_group=dist.group.WORLD
)

while not optimizer.finished:  # 2: is true on all processes behind the same step
    batch = torch.randint(len(labels), (16,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step(tokens=len(batch))  # 3: the tokens of this process
optimizer.finish()

with torch.no_grad():
    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
print(f"final model, {100 * accuracy:.1f} % of unseen digits; {optimizer.stats.merges} broadcasts taken over")
dist.destroy_process_group()
