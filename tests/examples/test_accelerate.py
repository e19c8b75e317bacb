"""An Accelerate loop in this process, as the only learner of a real syncer."""

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from tests.examples.conftest import assert_final, parameters_of, same, same_state, tokens_per_step
from yeto_torch import YetoOuterOptimizer

BATCH, ACCUMULATION = 4, 2


def prepared(seed):
    """(accelerator, model, our optimizer, the prepared one, scheduler, loader) of a learner."""
    torch.manual_seed(seed)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yeto = YetoOuterOptimizer(inner, model, fragments=2, streams=1, connect_timeout_s=60, final_timeout_s=60)
    loader = DataLoader(torch.randn(40, 8), batch_size=BATCH)
    return accelerator, model, yeto, *accelerator.prepare(yeto, StepLR(yeto, 1, 0.9), loader)


def train(accelerator, model, yeto, optimizer, scheduler, loader):
    for batch in loader:
        with accelerator.accumulate(model):
            yeto.count_tokens(len(batch))
            accelerator.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def test_a_loop_saves_resumes_and_ends_before_the_fleet(fleet, tmp_path):
    syncer, folder = fleet(total_steps=60)  # two rounds a step at most: the 10 steps below are over before
    learner = prepared(0)
    accelerator, model, yeto, optimizer, scheduler, _ = learner
    train(*learner)
    assert scheduler.scheduler.last_epoch == 5  # ten batches, two to a step
    with torch.no_grad():
        for parameter in model.parameters():  # what the fleet never hears of
            parameter.add_(1.0)
    accelerator.save_state(tmp_path / "state")
    saved, old = optimizer.state_dict(), parameters_of(model)
    yeto.close()

    learner = prepared(1)
    accelerator, model, yeto, optimizer, scheduler, _ = learner
    of_the_fleet = parameters_of(model)
    accelerator.load_state(tmp_path / "state")
    assert same(parameters_of(model), old)
    assert not same(old, of_the_fleet)
    yeto.resync()
    assert same(parameters_of(model), of_the_fleet)
    assert same_state(optimizer.state_dict()["state"], saved["state"])
    assert scheduler.scheduler.last_epoch == 5
    train(*learner)
    assert scheduler.scheduler.last_epoch == 10
    yeto.finish()
    assert syncer.wait() == 0
    assert_final(accelerator.unwrap_model(model), folder)
    assert tokens_per_step(folder) == {BATCH * ACCUMULATION, 0}
