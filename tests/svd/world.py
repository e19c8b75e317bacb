"""The exact-SVD pool without children: events in, and what a dumb twin of the ledger says must come out.

The twin keeps one list of unfinished jobs in order of submission. The first ``capacity`` of them hold permits, whatever
else happens; that sentence is the whole capacity rule, and it shares no code with the ledger.
"""

from syncer.svd import ledger as lg

STARTUP_S, REQUEST_S = 30.0, 10.0


class World:
    """``step(event)`` feeds the ledger and asserts the effects; ``module`` is the ledger's module or a broken copy."""

    def __init__(self, workers=2, capacity=3, module=lg):
        self.m, self.workers, self.capacity, self.now = module, workers, capacity, 100.0
        self.ledger = module.SvdLedger(
            [f"w{index}" for index in range(workers)],
            capacity=capacity,
            startup_timeout_s=STARTUP_S,
            request_timeout_s=REQUEST_S,
            now=self.now,
        )
        self.startup_due = self.now + STARTUP_S
        self.jobs = []  # unfinished, in order of submission
        self.due = {}
        self.running = {}  # worker -> job
        self.ready = set()
        self.drain_due = None
        self.ended = None  # "drained", "closed", or a word of the poison
        self.message = None
        self.fates = {}  # job -> what became of it

    # ------------------------------------------------------------------ the twin

    def deadlines(self):
        if self.ended:
            return {}
        found = {}
        if self.due:
            found["svd.request_timeout_s"] = min(self.due.values())
        if len(self.ready) < self.workers:
            found["svd.startup_timeout_s"] = self.startup_due
        if self.drain_due is not None:
            found["drain"] = self.drain_due
        return found

    def expected(self, event):
        out = []
        passed = {due: word for word, due in self.deadlines().items() if due <= self.now}
        if passed:
            out += self.end(passed[min(passed)], poison=True)
        match event:
            case lg.Submitted(job):
                if self.ended or self.drain_due is not None:
                    return [*out, ("RefuseJob", job)]
                self.jobs.append(job)
                self.due[job] = self.now + REQUEST_S
            case _ if self.ended:
                return out
            case lg.WorkerReady(worker):
                self.ready.add(worker)
            case lg.Answered(worker):
                job = self.running.pop(worker)
                self.jobs.remove(job)
                del self.due[job]
                out.append(("Deliver", job))
            case lg.WorkerFailed(_, reason):
                return out + self.end(reason, poison=True)
            case lg.DrainAsked(timeout_s):
                if self.drain_due is None:
                    self.drain_due = self.now + timeout_s
                    out += [("Withdraw", job) for job in self.jobs[self.capacity :]]
                    for job in self.jobs[self.capacity :]:
                        del self.due[job]
                    self.jobs = self.jobs[: self.capacity]
            case lg.CloseAsked():
                return out + self.end("closed", poison=False)
        admitted = [job for job in self.jobs[: self.capacity] if job not in self.running.values()]
        for worker in range(self.workers):
            if worker in self.ready and worker not in self.running and admitted:
                self.running[worker] = admitted.pop(0)
                out.append(("Assign", worker, self.running[worker]))
        if self.drain_due is not None and not self.jobs:
            out += self.end("drained", poison=False)
        return out

    def end(self, word, *, poison):
        self.ended = word
        self.jobs, self.due, self.running = [], {}, {}
        return [("Stop",), ("Poison", word)] if poison else [("Stop",)]

    # ------------------------------------------------------------------ the comparison

    def step(self, event):
        """Feed one event (a class of the real module and its arguments) now; ``None`` lets only time pass."""
        want = self.expected(event)
        if event is None:
            effects = self.ledger.on_time(self.now)
        else:
            fields = [getattr(event, name) for name in event.__slots__]
            effects = self.ledger.handle(getattr(self.m, type(event).__name__)(*fields), self.now)
        got = [self.plain(effect) for effect in effects]
        assert got == want, f"at {self.now} after {event}: {got}, must be {want}"
        self.check()
        return effects

    def plain(self, effect):
        name = type(effect).__name__
        match name:
            case "Poison":
                assert self.message is None, "poisoned twice"
                self.message = effect.reason
                assert self.ended in effect.reason
                return (name, self.ended)
            case "RefuseJob":
                assert effect.reason == (self.message or effect.reason)
                return (name, effect.job)
        if name in ("Deliver", "Withdraw"):
            assert self.fates.setdefault(effect.job, name) == name
        return (name, *(getattr(effect, field) for field in effect.__slots__))

    def check(self):
        state, deadlines = self.ledger.state.name, self.deadlines()
        assert self.ledger.next_deadline() == min(deadlines.values(), default=None)
        assert self.ledger.admitted == min(len(self.jobs), self.capacity)
        if self.ended:
            assert state == ("DRAINED" if self.ended == "drained" else "POISONED")
            assert (self.ledger.reason is None) == (self.ended == "drained")
            assert self.message in (None, self.ledger.reason)
        elif self.drain_due is not None:
            assert state == "DRAINING"
        else:
            assert state == ("SERVING" if len(self.ready) == self.workers else "STARTING")
        assert bool(self.ledger._due) == bool(self.jobs)


def play(world, rng, steps):
    """A life of ``steps`` events, with time passing in ways that meet deadlines exactly, narrowly or not at all."""
    job = 0
    for _ in range(steps):
        due = min(world.deadlines().values(), default=world.now)
        times = [world.now] * 24 + [world.now + 0.25] * 8 + [world.now + 1.0] * 2 + [due - 0.25] * 2 + [due]
        world.now = max(world.now, rng.choice(times))
        match rng.choice(["submit"] * 5 + ["ready"] * 3 + ["answer"] * 6 + ["time", "rare"]):
            case "submit":
                job += 1
                world.step(lg.Submitted(job))
            case "ready" if len(world.ready) < world.workers and not world.ended:
                world.step(lg.WorkerReady(rng.choice([w for w in range(world.workers) if w not in world.ready])))
            case "answer" if world.running:
                world.step(lg.Answered(rng.choice(sorted(world.running))))
            case "rare":
                world.step(
                    rng.choice(
                        [lg.DrainAsked(rng.choice([0.0, 1.0, 50.0]))] * 4
                        + [lg.CloseAsked(), lg.WorkerFailed(rng.randrange(world.workers), "ended with exit code 3")]
                    )
                )
            case _:
                world.step(None)
