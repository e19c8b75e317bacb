"""Learner processes die in mid-run and come back: nobody waits for the dead, and all end as one."""

import itertools
import signal

import numpy as np

from tests.support.real_learners import same_weights, start_script
from tests.support.saved_parameters import final_state, saved
from tests.support.waiting import until

SPACING_S, GRACE_S = 0.03, 0.3
RELAUNCH_S = 1.0  # pull, one local step, push; most of it is for a busy machine


def test_two_learners_killed_one_after_the_other_cost_one_relaunch_each(processes):
    total = 240
    syncer = processes.syncer(
        "schedule.quorum=2",
        "schedule.quorum_timeout_s=60",
        "schedule.sync_interval_steps=0",
        f"schedule.min_round_interval_ms={1000 * SPACING_S:.0f}",
        f"schedule.grace_ms={1000 * GRACE_S:.0f}",
        "checkpoint.mark_final=true",
        learners=2,
        total_steps=total,
    )

    def start(learner_id, name):
        options = {"run_id": "kills", "fragments": 3, "wire_dtype": "f32"}
        out = processes.folder / f"{name}.npz"
        # its seed is its name's: who comes back has other weights than the fleet
        return start_script(
            processes, syncer.address, learner_id, out=out, seed=len(name) + learner_id, optimizer=options
        )

    def commits():
        return len(syncer.merges())

    def away(learner_id):
        return [line for line in syncer.events("leave") if line["id"] == learner_id]

    def here(learner_id):
        return [line for line in syncer.events("join") if line["id"] == learner_id]

    learners = {0: start(0, "zero"), 1: start(1, "one")}
    names = {0: "zero", 1: "one"}
    until(lambda: commits() >= 20, "20 rounds together")
    undisturbed = 20
    for victim in (0, 1):
        before = commits()
        learners[victim].kill()
        assert learners[victim].code == -signal.SIGKILL
        until(lambda victim=victim: away(victim), "the syncer sees it gone")
        until(lambda before=before: commits() >= before + 5, "the other one goes on alone")
        names[victim] = f"{names[victim]} again"
        learners[victim] = start(victim, names[victim])
        until(lambda victim=victim: len(here(victim)) == 2, "it is back")
        back = commits()
        assert back + 5 < total, "the run was over before the learner was back"
        until(lambda back=back: commits() >= min(back + 5, total - 1), "rounds together again")

    assert syncer.wait() == 0, syncer.told()
    assert [learner.wait() for learner in learners.values()] == [0, 0], [one.told() for one in learners.values()]
    results = [list(np.load(processes.folder / f"{name}.npz").values()) for name in names.values()]
    assert same_weights(*results, final_state(syncer.folder / "model.safetensors"), saved(syncer.checkpoint))
    assert (syncer.folder / "checkpoint.final").read_text() == f"YETO_FINAL_V1\nglobal_step={total}\n"

    lines = syncer.merges()
    assert [line["step"] for line in lines] == list(range(1, total + 1))
    gaps = [later["time"] - earlier["time"] for earlier, later in itertools.pairwise(lines)]
    normal = max(SPACING_S, *gaps[: undisturbed - 1])
    assert max(gaps) < normal + GRACE_S + RELAUNCH_S, sorted(gaps)[-5:]
    assert all(line["attempt"] <= 2 for line in lines)  # one relaunch, not several
    assert all(set(line["responded"]) <= set(line["expected"]) for line in lines)
    for learner_id in (0, 1):
        first, second = here(learner_id)
        assert first["generation"] != second["generation"]
        alone = [line for line in lines if away(learner_id)[0]["time"] < line["time"] < second["time"]]
        assert len(alone) >= 5
        assert all(line["responded"] == [1 - learner_id] for line in alone)
