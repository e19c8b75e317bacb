"""Who is here: supersession, late ends, absences."""

from hypothesis import given
from hypothesis import strategies as st

from syncer.core.events import Member
from syncer.core.roster import Roster


def superseded(old, new):
    roster = Roster()
    roster.join(old)
    roster.join(new)
    return roster, old, new


def test_a_new_generation_supersedes_and_the_old_one_stays_live():
    roster, old, new = superseded(Member(0, 5), Member(0, 3))
    assert roster.current == (new,), "the later connection counts, not the larger generation"
    assert roster.is_live(old)
    assert roster.is_live(new)
    assert roster.current_of(0) == new


def test_the_late_end_of_a_superseded_group_removes_nothing_else():
    roster, old, new = superseded(Member(0, 1), Member(0, 2))
    roster.leave(old, 9.0)
    assert roster.current == (new,)
    assert not roster.is_live(old)
    assert roster.longest_absent() is None


def test_the_end_of_the_current_group_does_not_bring_the_old_one_back():
    roster, old, new = superseded(Member(0, 1), Member(0, 2))
    roster.leave(new, 4.0)
    assert roster.current == ()
    assert roster.is_live(old)
    assert roster.longest_absent() == (0, 4.0)


def test_absence_runs_from_the_end_to_the_next_join_and_the_longest_is_named():
    roster = Roster()
    for learner_id in (0, 1, 2):
        roster.join(Member(learner_id, 1))
    roster.leave(Member(2, 1), 5.0)
    roster.leave(Member(1, 1), 7.0)
    assert roster.longest_absent() == (2, 5.0)
    roster.join(Member(2, 2))
    assert roster.longest_absent() == (1, 7.0)
    roster.join(Member(1, 2))
    assert roster.longest_absent() is None


def test_a_learner_that_never_came_is_not_absent():
    assert Roster().longest_absent() is None


def test_redialling_piles_up_no_groups():
    roster, released = Roster(), []
    for generation in range(1, 12):
        released += roster.join(Member(0, generation))
        for member in released:
            roster.leave(member, 0.0)
    assert released == [Member(0, generation) for generation in range(1, 7)]
    assert sum(roster.is_live(Member(0, generation)) for generation in range(1, 12)) == 5


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3))))
def test_the_roster_equals_a_dumb_twin(moves):
    """Twin: the list of joins and leaves, searched from the end."""
    roster, log, count = Roster(), [], 0
    for joins, learner_id, which in moves:
        if joins:
            count += 1
            log.append(("join", Member(learner_id, count)))
            for member in roster.join(Member(learner_id, count)):
                log.append(("leave", member))
                roster.leave(member, 0.0)
        else:
            live = [m for m in _live(log) if m.learner_id == learner_id]
            if live:
                log.append(("leave", live[which % len(live)]))
                roster.leave(live[which % len(live)], 0.0)
        joined = [m for what, m in reversed(log) if what == "join"]
        latest = [next((m for m in joined if m.learner_id == i), None) for i in range(4)]
        assert roster.current == tuple(m for m in latest if m is not None and m in _live(log))
        assert all(roster.is_live(m) == (m in _live(log)) for _, m in log)


def _live(log):
    return [m for what, m in log if what == "join" and ("leave", m) not in log]
