"""One seed of the demonstration: train the fleet, then what it is compared with.

The fleet's model is the syncer's final one, read back from the run folder; what a learner holds in memory never counts.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
from rich.console import Console

from yeto_torch.demos.baselines import train_alone, train_synchronously
from yeto_torch.demos.follow import RunView
from yeto_torch.demos.progress import showing
from yeto_torch.demos.report import Arm, Result, Trained, draw, gradient_bytes
from yeto_torch.demos.task import LEARNERS, evaluate, make_task
from yeto_torch.launcher.final import load_final
from yeto_torch.launcher.fleet import start
from yeto_torch.launcher.folder import RunFolder
from yeto_torch.launcher.launch import Launch
from yeto_torch.wire.errors import RunError

SYNC_INTERVAL_STEPS = {"even": 24, "classes": 12}  # learners whose data differ drift apart faster: they meet more often
EVALUATIONS = 24  # of the held-out data, by learner 0 over the run
QUICK = 4  # times fewer steps


class FleetError(RunError):
    """The fleet did not complete; carries the launcher's exit code and the end of the failed child's output."""

    def __init__(self, text: str, code: int, tail: tuple[str, ...]) -> None:
        super().__init__(text)
        self.code = code
        self.tail = tail


class Comparison:
    """The trainings of one seed and what came out of them."""

    def __init__(self, console: Console, options: argparse.Namespace, seed: int, folder: RunFolder) -> None:
        torch.set_num_threads(1)  # such small models are slower on two, above all beside other work
        self._console, self._options, self._seed, self._folder = console, options, seed, folder
        self._name = "text" if options.text else "digits"
        self._task = make_task(self._name, split=options.split, seed=seed)
        self._steps = options.steps or self._task.steps // (QUICK if options.quick else 1)
        self._interval = SYNC_INTERVAL_STEPS[options.split]
        fragments = self._task.fragments
        self._rounds = max(2 * fragments, round(self._steps * fragments / self._interval))
        self._arms: list[Arm] = []
        self._evaluate_at: list[int] = []  # batches that the fleet had seen; what it is compared with is asked then too

    def run(self) -> Result:
        """Raises FleetError where the fleet did not complete."""
        view = RunView(self._folder, LEARNERS)
        began = time.monotonic()
        self._train_fleet(view)
        seconds = time.monotonic() - began
        steps = [learner.step for learner in view.learners]
        fleet = self._final_of_fleet(steps, sum(learner.bytes_moved for learner in view.learners))
        held_out = view.held_out()
        self._add_arm("fleet, learner 0 between merges", held_out, 1, fleet)
        self._evaluate_at = [step for step, _, _ in held_out]
        lone = range(LEARNERS) if self._options.split == "classes" else range(1)
        alone = [self._alone(learner, steps[learner]) for learner in lone]
        synchronous = self._synchronous(round(sum(steps) / LEARNERS))
        title = f"{self._task.title}, {self._options.split} split"
        draw(self._folder.path / "curves.png", title, self._arms)
        return Result(self._seed, fleet, alone, synchronous, self._rounds, seconds)

    def _train_fleet(self, view: RunView) -> None:
        self._say(
            f"fleet: a syncer and {LEARNERS} learners on {self._task.title}, {self._options.split} split, "
            f"seed {self._seed}: {self._rounds} rounds, about {self._steps} steps each"
        )
        command = ["-m", "yeto_torch.demos.learner", f"--task={self._name}", f"--split={self._options.split}"]
        command += [f"--seed={self._seed}", f"--total-steps={self._rounds}"]
        command += [f"--evaluate-every={max(1, self._steps // EVALUATIONS)}"]
        keys = (f"total_steps={self._rounds}", f"schedule.sync_interval_steps={self._interval}")
        launch = Launch(self._folder, LEARNERS, tuple(command), keys)
        self._folder.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            show = stack.enter_context(showing(self._console, view, self._rounds))
            names = ("syncer", *(f"learner {learner}" for learner in range(LEARNERS)))
            logs = {
                name: stack.enter_context((self._folder.path / f"{name.replace(' ', '-')}.log").open("w"))
                for name in names
            }
            outcome = start(launch, lambda name, text: print(text, file=logs[name]), lambda _: None, show)
        view.update()
        if outcome.code:
            who = "the fleet" if outcome.failure is None else outcome.failure.name
            why = outcome.note or f"exit code {outcome.code}"
            tail = () if outcome.failure is None else outcome.failure.tail
            raise FleetError(f"{who} failed: {why}; logs in {self._folder.path}", outcome.code, tail)

    def _final_of_fleet(self, steps: list[int], bytes_moved: int) -> Trained:
        model = self._task.model()
        load_final(model, self._folder.path)
        accuracy, loss = evaluate(model, self._task)
        samples = sum(steps) * self._task.batch
        return Trained("fleet, final model", accuracy, loss, sum(steps) / LEARNERS, samples, bytes_moved)

    def _alone(self, learner: int, steps: int) -> Trained:
        part = f"digits {5 * learner} to {5 * learner + 4}" if self._options.split == "classes" else "half of the data"
        name = f"alone, {part}"
        self._say(f"one learner {name}: {steps} steps")
        curve = train_alone(self._task, learner, steps, self._evaluate_at)
        trained = Trained(name, curve.accuracy, curve.final_loss, steps, steps * self._task.batch, None)
        self._add_arm(name, curve.held_out, 1, trained)
        return trained

    def _synchronous(self, steps: int) -> Trained:
        name = "synchronous training"
        self._say(f"{name}: {steps} steps on the batches of both learners")
        evaluate_at = [round(step / LEARNERS) for step in self._evaluate_at]
        curve = train_synchronously(self._task, LEARNERS, steps, evaluate_at)
        parameters = sum(p.numel() for p in self._task.model().parameters())
        samples = LEARNERS * steps * self._task.batch
        moved = gradient_bytes(parameters, steps, LEARNERS)
        trained = Trained(name, curve.accuracy, curve.final_loss, steps, samples, moved)
        self._add_arm(name, curve.held_out, LEARNERS, trained)
        return trained

    def _add_arm(self, label: str, held_out: list[tuple[int, float, float]], batches: int, end: Trained) -> None:
        """``batches``: what each step counted in ``held_out`` has seen."""
        samples = batches * self._task.batch
        points = [(samples * step, accuracy, loss) for step, accuracy, loss in held_out]
        self._arms.append(Arm(label, points, end))

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
