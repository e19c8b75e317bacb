"""``python -m yeto_torch.demos.arms``: the final model of a benchmark's run folder, and the synchronous arm beside it.

The synchronous arm makes as many steps as each learner did, on the batches of all learners at once: the same samples,
in the same order, one gradient. It has the whole machine to itself, as the fleet had.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from yeto_torch.demos.baselines import train_synchronously
from yeto_torch.demos.task import evaluate, make_task
from yeto_torch.launcher.final import load_final


def main() -> None:
    """Writes ``{"fleet": {accuracy, loss}, "synchronous": {accuracy, loss, seconds, samples}}`` to ``--output``."""
    options = _options()
    task = make_task(options.task, split=options.split, seed=options.seed, learners=options.learners)
    model = task.model()
    load_final(model, options.run_dir)
    accuracy, loss = evaluate(model, task)

    curve = train_synchronously(task, options.learners, options.steps, evaluate_at=())
    synchronous = {
        "accuracy": curve.accuracy,
        "loss": curve.final_loss,
        "seconds": curve.seconds,
        "samples": options.learners * options.steps * task.batch,
    }
    result = {"fleet": {"accuracy": accuracy, "loss": loss}, "synchronous": synchronous}
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["digits", "text"], required=True)
    parser.add_argument("--split", choices=["even", "classes"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--learners", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of each learner")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
