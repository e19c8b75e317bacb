"""``on_sync``: what a learner's user is told, when, and what happens if the user raises."""

import threading
from contextlib import contextmanager

import pytest

from tests.support.joined_learner import heard, join, model_of, started, vector, zero_gradients
from yeto_torch.config import LearnerConfig
from yeto_torch.learner.syncs import Sync
from yeto_torch.wire.messages import FinalAck

TWO = {"a": vector(1, 2, 3), "b": vector(4, 5)}
VALUES = [vector(10, 20, 30), vector(40, 50)]


@contextmanager
def released(group):
    """The syncer's part behind the cut: SHUTDOWN for the acknowledgement."""
    thread = threading.Thread(target=lambda: (group.next(FinalAck), group.shutdown()))
    thread.start()
    yield
    thread.join()


def told(record):
    return (record.fragment, record.version, record.previous_version, record.skipped, record.c_steps, record.c_tokens)


def test_every_broadcast_is_told_once_behind_its_boundary_on_the_training_thread(syncer):
    model, records, seen = model_of(**TWO), [], []

    def on_sync(record):
        records.append(record)
        seen.append((threading.get_ident(), model.a.tolist(), model.b.tolist()))

    optimizer, group = started(syncer, model, VALUES, fragments=2, on_sync=on_sync, tokens=7)
    assert [told(r) for r in records] == [(0, 0, None, 0, 1, 7), (1, 0, None, 0, 1, 7)]
    assert seen == [(threading.get_ident(), [10, 20, 30], [40, 50])] * 2  # both are in place before the first is told
    assert records[0].stats == records[1].stats == optimizer.stats
    assert records[0].stats.merges == 2

    for _ in range(3):
        optimizer.step(tokens=5)
    assert len(records) == 2  # nothing new, nothing told
    group.broadcast(0, 1, vector(1, 1, 1))
    heard(optimizer, a=(0, 1))
    optimizer.step(tokens=5)
    group.broadcast(0, 7, vector(2, 2, 2))  # versions 3 and 5 went by
    heard(optimizer, a=(0, 7))
    optimizer.step(tokens=1)
    assert [told(r) for r in records[2:]] == [(0, 1, 0, 0, 4, 20), (0, 7, 1, 2, 1, 1)]
    assert [(r.global_step, r.local_step, r.final) for r in records[2:]] == [(1, 5, False), (7, 6, False)]
    optimizer.close()


def test_the_final_cut_is_told_with_the_final_parameters(syncer):
    model, records = model_of(**TWO), []
    optimizer, group = started(
        syncer, model, VALUES, fragments=2, on_sync=lambda r: records.append((r, model.a.tolist())), tokens=3
    )
    with released(group):
        group.cut(2, (1, 2), [vector(7, 8, 9), vector(6, 5)])
        optimizer.finish()
    (record, values) = records[-1]
    assert values == [7, 8, 9]
    assert (record.final, record.fragment, record.version, record.global_step) == (True, None, 2, 2)
    assert (record.local_step, record.c_steps, record.c_tokens, record.previous_version) == (1, 1, 3, 0)
    assert [r.final for r, _ in records] == [False, False, True]


def test_the_constructor_tells_nothing_and_the_first_step_nothing_old(syncer):
    records = []
    thread = threading.Thread(target=lambda: syncer.group(0).broadcast_all(0, VALUES))
    thread.start()
    model = model_of(**TWO)
    optimizer = join(syncer, model, fragments=2, wait_for_start=True, on_sync=records.append)
    thread.join()
    assert model.a.tolist() == [10, 20, 30]
    zero_gradients(model)
    optimizer.step()
    assert records == []
    syncer.group(0).broadcast(1, 2, vector(1, 1))
    heard(optimizer, b=(1, 2))
    optimizer.step()
    assert [told(r) for r in records] == [(1, 2, 0, 0, 2, 2)]  # counted from the constructor's
    optimizer.close()


def test_what_it_raises_comes_out_of_step_with_a_note_and_training_may_go_on(syncer):
    model, records = model_of(**TWO), []

    def on_sync(record):
        records.append(record)
        if record.version == 1:
            raise KeyError("no such metric")

    optimizer, group = started(syncer, model, VALUES, fragments=2, on_sync=on_sync)
    group.broadcast(0, 1, vector(5, 5, 5))
    heard(optimizer, a=(0, 1))
    with pytest.raises(KeyError, match="no such metric") as caught:
        optimizer.step()
    assert caught.value.__notes__ == [
        "raised by on_sync, which was told of version 1 of fragment 0; the parameters are in place"
    ]
    assert model.a.tolist() == [5, 5, 5]
    group.broadcast(1, 2, vector(6, 6))
    heard(optimizer, b=(1, 2))
    optimizer.step()  # neither the session nor the callback is lost
    assert [(r.fragment, r.version) for r in records] == [(0, 0), (1, 0), (0, 1), (1, 2)]
    optimizer.close()


def test_a_callback_that_raises_while_leaving_does_not_keep_the_connection(syncer):
    def on_sync(record):
        if record.final:
            raise RuntimeError("the writer is closed")

    model = model_of(**TWO)
    optimizer, group = started(syncer, model, VALUES, fragments=2, on_sync=on_sync)
    with released(group):
        group.cut(2, (1, 2), [vector(7, 8, 9), vector(6, 5)])
        with pytest.raises(RuntimeError, match="the writer is closed"):
            optimizer.finish()
    assert model.a.tolist() == [7, 8, 9]
    optimizer.close()
    group.wait_closed()
    assert optimizer.finished


def test_what_is_no_function_is_refused_by_name():
    with pytest.raises(ValueError, match=r"on_sync='log'.*a function of one argument"):
        LearnerConfig(syncer="h:1", learner_id=0, on_sync="log")


def test_two_lines_of_tensorboard(syncer, tmp_path):
    board = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = model_of(**TWO)
    writer = board.SummaryWriter(tmp_path)
    optimizer = join(
        syncer,
        model,
        fragments=2,
        on_sync=lambda s: writer.add_scalar("yeto/global_step", s.global_step, s.local_step),
    )
    group = syncer.group(0)
    for version in (0, 1, 3):
        for fragment in range(2):
            group.broadcast(fragment, version + fragment * (version > 0), VALUES[fragment])
        heard(optimizer, a=(0, version), b=(1, version + (version > 0)))
        zero_gradients(model)
        optimizer.step()
    optimizer.close()
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("yeto/global_step")]
    assert points == [(1, 0), (1, 0), (2, 2), (2, 2), (3, 4), (3, 4)]


def test_a_record_is_small_and_frozen():
    record = Sync(0, 1, 0, 0, 1, 1, 1, 1, final=False, stats=None)
    with pytest.raises(AttributeError):
        record.version = 2
    assert not hasattr(record, "__dict__")
