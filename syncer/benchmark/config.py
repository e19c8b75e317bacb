"""Every key of ``python -m syncer.benchmark``, and the way to a frozen plan.

The schema is the syncer's with keys added: what a user says about merging or scheduling reaches both syncer processes
under the same name, judged by the same rules. Keys the experiment itself decides are refused.

Must not know: how values came together (``compose``), processes, files but for the run folder's place.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from syncer.config import rules
from syncer.config.keys import REQUIRED, SYNCER, Keys, SyncerConfig, Values, key, validate
from syncer.config.rules import Rule, wrong
from yeto_torch.wire.constants import MAX_STREAMS, U32_MAX, U64_MAX

ENDLESS = 10**15  # outer steps that no cut-off process reaches before its learners have used up their budget
DECIDED_HERE = (
    "total_steps",
    "listen.address_file",
    "checkpoint.path",
    "checkpoint.resume",
    "checkpoint.mark_final",
    "final.state_path",
    "final.layout_path",
    "tape.path",
    "budget.learner_steps",
    "progress",
)
"""Keys of the syncer that the benchmark sets for each of its processes and refuses from a user."""
_UNBOUND = "the two processes differ by design, so no learner can bind to a profile"


# --------------------------------------------------------------------------------------------------------- schema


def _refused(_: object) -> None:
    raise ValueError


def _expression() -> Rule:
    def parse(value: object) -> str:
        try:
            re.compile(str(value))
        except re.error as error:
            raise ValueError from error
        return str(value)

    return Rule("a regular expression", parse)


@dataclass
class DefaultLearnerConfig:
    """The default learner: a task of the demonstration. With a command of your own all of this is its business."""

    task: str = key("digits", rules.word(Literal["digits", "text"]), "what is trained")
    split: str = key("even", rules.word(Literal["even", "classes"]), "of the digits: dealt out in turn, or by class")
    seed: int = key(0, rules.whole(0, U32_MAX), "of weights, data order and augmentation")
    fragments: int | None = key(None, rules.whole(1, U32_MAX), "fragments of the layout; null = the task's")
    matrix_merge: str = key("rda", rules.word(Literal["rda", "iso"]), "how matrices are merged")
    average: str | None = key(None, _expression(), "names of further tensors merged by plain averaging")
    wire_dtype: str = key("bf16", rules.word(Literal["f32", "bf16", "q4"]), "what travels")
    streams: int = key(4, rules.whole(0, MAX_STREAMS), "data sockets of a learner")


@dataclass
class BenchmarkConfig(SyncerConfig):
    """The syncer's keys and the benchmark's own."""

    total_steps: int = key(ENDLESS, rules.whole(1, U64_MAX), "decided by the benchmark")
    budget_steps: int = key(REQUIRED, rules.whole(1, U32_MAX), "local steps of every learner, exactly")
    run_dir: str | None = key(None, rules.path("of a new or empty folder"), "null = runs/benchmark-<time>")
    baseline: bool = key(False, rules.flag(), "also train the synchronous arm on equal samples (--baseline)")
    stop_grace_s: float = key(15.0, rules.real(0, 1e9, above=True), "for a child to end once it is asked to")
    profile: Any = field(default=None, metadata={"rule": Rule(f"null: {_UNBOUND}", _refused, "must be null")})
    learner: DefaultLearnerConfig = field(default_factory=DefaultLearnerConfig)


BENCHMARK = Keys(BenchmarkConfig, "benchmark")


# ----------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """What to conduct.

    Attributes:
        budget_steps: local steps of each learner.
        folder: the run folder, absolute, new or empty.
        command: the user's learner, as arguments of the Python interpreter; None = the default learner.
        options: the default learner's, key -> value.
        baseline: train the synchronous arm too.
        stop_grace_s: how long a child may take to end once it is asked to.
        host, port: of the syncer; port 0 = any free one.
        secrets: what the learners' environment must name, so that they can join a protected syncer.
        syncer: dotted key -> value for both syncer processes, less what the benchmark decides.
    """

    learners: int
    budget_steps: int
    folder: Path
    command: tuple[str, ...] | None
    options: Mapping[str, object]
    baseline: bool
    stop_grace_s: float
    host: str
    port: int
    secrets: Mapping[str, str]
    syncer: Mapping[str, object]


def make_plan(config: BenchmarkConfig, command: Sequence[str] | None) -> BenchmarkPlan:
    """Check every value, alone and together, and ``command``, what stood behind ``--`` (None when there was none).

    Raises ValueError, one line: the key, the value, the legal range.
    """
    values = BENCHMARK.parsed(config)
    _check_decided(values)
    validate(_syncer_config(config))
    _check_learner(values, command)
    folder, given = _folder(values["run_dir"]), BENCHMARK.given(config)
    return BenchmarkPlan(
        learners=values["learners"],
        budget_steps=values["budget_steps"],
        folder=folder,
        command=None if command is None else tuple(command),
        options={entry.name: values[f"learner.{entry.name}"] for entry in fields(DefaultLearnerConfig)},
        baseline=values["baseline"],
        stop_grace_s=values["stop_grace_s"],
        host=values["listen.host"],
        port=values["listen.port"],
        secrets=_secrets(values),
        syncer={name: given[name] for name in SYNCER.rules if name not in DECIDED_HERE},
    )


def _secrets(values: Values) -> dict[str, str]:
    """A certificate is its own authority unless the environment names another."""
    key, certificate = values["security.hmac_key_file"], values["security.tls_cert"]
    found = {} if key is None else {"YETO_HMAC_KEY_FILE": str(key.absolute())}
    if certificate is not None and not os.environ.get("YETO_TLS_CA"):
        found["YETO_TLS_CA"] = str(certificate.absolute())
    return found


def _check_decided(values: Mapping[str, object]) -> None:
    for name in DECIDED_HERE:
        default = BENCHMARK.rules[name].parse(d) if (d := BENCHMARK.defaults[name]) is not None else None
        if values[name] != default:
            raise wrong(name, values[name], "left out: the benchmark decides it for each of its processes")
    if values["session.require_profile_binding"]:
        raise wrong("session.require_profile_binding", True, f"false: {_UNBOUND}")


def _syncer_config(config: BenchmarkConfig) -> SyncerConfig:
    return SyncerConfig(**{item.name: copy.deepcopy(getattr(config, item.name)) for item in fields(SyncerConfig)})


def _check_learner(values: Values, command: Sequence[str] | None) -> None:
    if command is None:
        if values["learner.split"] == "classes" and values["learner.task"] != "digits":
            raise wrong("learner.split", "classes", f"even for learner.task={values['learner.task']}")
        if values["learner.split"] == "classes" and values["learners"] > 10:
            raise wrong("learners", values["learners"], "at most 10 for learner.split=classes: there are ten digits")
        return
    for name in BENCHMARK.rules:
        if name.startswith("learner.") and values[name] != BENCHMARK.defaults[name]:
            raise wrong(name, values[name], "left out: it is for the default learner, not for a command of your own")
    if values["baseline"]:
        raise wrong("baseline", True, "false: only the default learner's task has a synchronous arm")
    if not command or list(command) == ["-m"]:
        raise ValueError("no script behind --: must be a learner, as in -- train.py --epochs 3")
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise ValueError(f"-- {command[0]}: must be an existing script, or -m MODULE")


def _folder(path: Path | None) -> Path:
    """The run folder; nothing is created."""
    if path is None:
        path, number = Path("runs") / time.strftime("benchmark-%Y%m%d-%H%M%S"), 1
        while path.exists():
            number += 1
            path = path.with_name(f"{path.name.partition('_')[0]}_{number}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise wrong("run_dir", path, "a new or an empty folder: an experiment is never continued")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise wrong("run_dir", path, f"in a folder this user may write to, unlike {parent}")
    return path.absolute()
