"""In a new process: load what another one saved, make one step, write the parameters.

again.py SUBJECT SAVED RESULT
"""

import sys

import torch

from tests.contract.loop import adamw, network, train
from tests.contract.subjects import SUBJECTS


def main(name: str, saved: str, result: str) -> None:
    state = torch.load(saved, weights_only=True)
    model = network(seed=1)  # other weights than those that are loaded
    subject = SUBJECTS[name](None)
    optimizer = subject.wrap(model, adamw(model))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, 1)
    torch.save(model.state_dict(), result)
    subject.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
