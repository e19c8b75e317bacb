"""The learner-budget cut-off: who has reported, and what makes the experiment void.

Decides only on reports. The coordinator stops launching and cancels rounds when the first one is accepted.

    OPEN --first accepted report--> CLOSING --one from every learner--> DRAINING --checkpoint--> WRITTEN
    void, whatever the state: a wrong step count; a second report of one learner, from any generation; the timeout

Source: v4 §Budget (BUDGET_DONE, the cut-off process); rulings §6.9.
"""

from __future__ import annotations


class Cutoff:
    """Collects exactly one exact report from every configured learner.

    Args:
        steps: the learner budget every report must name.
        timeout_s: how long the others may take after the first report.
    """

    def __init__(self, steps: int, learners: int, timeout_s: float) -> None:
        self._steps, self._learners, self._timeout_s = steps, learners, timeout_s
        self._reported: set[int] = set()
        self.deadline: float | None = None

    @property
    def closed(self) -> bool:
        """Has the first report closed ordinary issuance?"""
        return bool(self._reported)

    @property
    def complete(self) -> bool:
        return len(self._reported) == self._learners

    @property
    def missing(self) -> tuple[int, ...]:
        """Learners without a report, ascending."""
        return tuple(i for i in range(self._learners) if i not in self._reported)

    def report(self, learner_id: int, steps: int, now: float) -> str | None:
        """One report; None when accepted, else why the experiment is void."""
        if steps != self._steps:
            return f"learner {learner_id} reported {steps} local steps, the budget is {self._steps}"
        if learner_id in self._reported:
            return f"learner {learner_id} reported its budget twice"
        if not self._reported:
            self.deadline = now + self._timeout_s
        self._reported.add(learner_id)
        return None

    def overdue(self, now: float) -> str | None:
        """Why the experiment is void once the deadline has passed; None before."""
        if self.deadline is None or now < self.deadline:
            return None
        if self.complete:
            return f"learner 0 has not sent all starting values within {self._timeout_s:g} s of the first budget report"
        missing = ", ".join(map(str, self.missing))
        return f"no budget report within {self._timeout_s:g} s of the first one from learners {missing}"
