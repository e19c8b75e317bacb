"""The global state: whole commits or none, shared immutable payloads, versions, devices."""

import numpy as np
import pytest
import torch

from syncer.merge.intake import learner_weight
from syncer.merge.merge import merge_fragment
from syncer.state import GlobalState, resolve_device
from tests.support import merge_oracle as oracle
from yeto_torch.wire import codec
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.errors import LocalError, RunError
from yeto_torch.wire.layout import WireFragment, WireLayout, version_at

pytestmark = pytest.mark.usefixtures("either_way")

CPU = torch.device("cpu")
LAYOUT = WireLayout(
    (
        WireFragment(MergeMode.AVG, (5,)),
        WireFragment(MergeMode.RDA, (300, 2)),
        WireFragment(MergeMode.ISO, (6,), ((2, 3),)),
    )
)


def fresh(seed=0):
    rng = torch.Generator().manual_seed(seed)
    state = GlobalState(LAYOUT, CPU)
    for fragment, numel in enumerate(LAYOUT.numels):
        state.initialize(fragment, torch.randn(numel, generator=rng))
    return state


def gradient(fragment, value=0.5):
    return torch.full((LAYOUT.numels[fragment],), value)


# ---------------------------------------------------------------- life of a fragment


def test_it_starts_empty():
    state = GlobalState(LAYOUT, CPU)
    assert [state.initialized(f) for f in range(3)] == [False] * 3
    assert (state.step, state.versions) == (0, (0, 0, 0))
    for use in (state.params, state.momentum, state.host, state.final_bytes):
        with pytest.raises(LocalError, match="fragment 1 has no parameters"):
            use(1)


def test_initialising():
    state = GlobalState(LAYOUT, CPU)
    state.initialize(1, torch.arange(302.0))
    assert [state.initialized(f) for f in range(3)] == [False, True, False]
    assert torch.equal(state.params(1), torch.arange(302.0))
    assert torch.equal(state.momentum(1), torch.zeros(302))
    with pytest.raises(LocalError, match="initialised already"):
        state.initialize(1, torch.zeros(302))


@pytest.mark.parametrize("values", [torch.zeros(4), torch.zeros(5, dtype=torch.float64), torch.zeros(1, 5)])
def test_tensors_that_do_not_fit(values):
    state = GlobalState(LAYOUT, CPU)
    with pytest.raises(LocalError, match="fragment 0"):
        state.initialize(0, values)
    with pytest.raises(LocalError, match="fragment 0"):
        state.restore(0, 1, torch.zeros(5), values)
    assert not state.initialized(0)


def test_versions_follow_the_law():
    state = fresh()
    for step in range(1, 9):
        state.commit(step, (step - 1) % 3, gradient((step - 1) % 3), 0.7, 0.9)
        assert state.step == step
        assert state.versions == tuple(version_at(f, step, 3) for f in range(3))


@pytest.mark.parametrize(("step", "fragment"), [(1, 0), (3, 2), (2, 0), (2, 2), (0, 2)])
def test_commits_are_strictly_the_next_step_on_its_own_fragment(step, fragment):
    state = fresh()
    state.commit(1, 0, gradient(0), 0.7, 0.9)
    with pytest.raises(LocalError, match="commit of step"):
        state.commit(step, fragment, gradient(fragment), 0.7, 0.9)
    assert state.step == 1


# ---------------------------------------------------------------- the step


def test_each_fragment_has_its_own_momentum():
    state = fresh()
    before = [state.params(f).numpy().copy() for f in range(3)]
    state.commit(1, 0, gradient(0), 0.7, 0.9)
    params, momentum = oracle.outer(before[0], np.zeros(5, np.float32), gradient(0).numpy(), 0.7, 0.9)
    assert np.array_equal(state.params(0).numpy(), params)
    assert np.array_equal(state.momentum(0).numpy(), momentum)
    for other in (1, 2):
        assert np.array_equal(state.params(other).numpy(), before[other])
        assert not state.momentum(other).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_step_that_must_not_be_taken_changes_nothing(bad):
    state = fresh()
    state.momentum(0).fill_(3e38)
    payload = state.broadcast_bytes(0, WireDType.F32)
    kept = [x.clone() for x in (state.params(0), state.momentum(0))]
    with pytest.raises(RunError, match=r"step 1, fragment 0: .*finite"):
        state.commit(1, 0, gradient(0, bad), 0.7, 0.9)
    assert torch.equal(state.params(0), kept[0])
    assert torch.equal(state.momentum(0), kept[1])
    assert (state.step, state.versions) == (0, (0, 0, 0))
    assert state.broadcast_bytes(0, WireDType.F32) is payload
    state.momentum(0).zero_()
    state.commit(1, 0, gradient(0), 0.7, 0.9)
    assert state.step == 1


def test_a_run_equals_the_oracle_and_itself():
    """Merge, step, merge on the new momentum, ...: twelve rounds over three merge modes, twice the same bits."""

    def play():
        rng = np.random.default_rng(3)
        state = fresh(3)
        for step in range(1, 13):
            fragment = (step - 1) % 3
            numel = LAYOUT.numels[fragment]
            answers = [torch.from_numpy(rng.standard_normal(numel).astype(np.float32)) for _ in range(3)]
            weights = [learner_weight(int(rng.integers(1, 5000)), int(rng.integers(1, 50))) for _ in range(3)]
            yield state, fragment, answers, weights
            merged = merge_fragment(
                LAYOUT.fragments[fragment], answers, weights, state.momentum(fragment), correction=True
            )[0]
            state.commit(step, fragment, merged, 0.7, 0.9)
        yield state, None, None, None

    for state, fragment, answers, weights in play():
        if fragment is None:
            break
        layout = LAYOUT.fragments[fragment]
        before = [x.numpy().copy() for x in state.host(fragment)]
        want = oracle.merge(
            layout.mode.name.lower(),
            layout.numels,
            layout.dims,
            [a.numpy() for a in answers],
            weights,
            before[1],
            correction=True,
        )
        merged = merge_fragment(layout, answers, weights, state.momentum(fragment), correction=True)[0]
        assert oracle.close(merged, want, 1e-5)
    again = [entry[0] for entry in play()][-1]
    for f in range(3):
        assert torch.equal(state.params(f), again.params(f))
        assert torch.equal(state.momentum(f), again.momentum(f))


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", WireDType)
def test_a_broadcast_is_the_bulk_encoding_and_shared(dtype):
    state = fresh()
    data = state.broadcast_bytes(1, dtype)
    assert bytes(data) == bytes(codec.encode(state.params(1), dtype.bulk))
    assert data.readonly
    assert state.broadcast_bytes(1, dtype) is data


@pytest.mark.parametrize("dtype", WireDType)
def test_a_broadcast_outlives_the_commit_that_follows(dtype):
    state = fresh()
    data = state.broadcast_bytes(0, dtype)
    before = bytes(data)
    state.commit(1, 0, gradient(0), 0.7, 0.9)
    assert bytes(data) == before
    after = state.broadcast_bytes(0, dtype)
    assert bytes(after) == bytes(codec.encode(state.params(0), dtype.bulk)) != before


def test_one_version_in_two_dtypes():
    state = fresh()
    assert state.broadcast_bytes(1, WireDType.F32).nbytes == 4 * 302
    assert state.broadcast_bytes(1, WireDType.Q4).nbytes == 2 * 302


def test_final_bytes_are_exact_f32_and_end_the_steps():
    state = fresh()
    state.commit(1, 0, gradient(0), 0.7, 0.9)
    data = state.final_bytes(0)
    assert data.readonly
    assert bytes(data) == state.params(0).numpy().tobytes()
    with pytest.raises(LocalError, match="after the final bytes"):
        state.commit(2, 1, gradient(1), 0.7, 0.9)


def test_host_tensors_restore_to_the_same_state():
    state = fresh()
    for step in range(1, 5):
        state.commit(step, (step - 1) % 3, gradient((step - 1) % 3), 0.7, 0.9)
    twin = GlobalState(LAYOUT, CPU)
    for fragment, version in enumerate(state.versions):
        params, momentum = state.host(fragment)
        assert (params.dtype, params.device.type, params.is_contiguous()) == (torch.float32, "cpu", True)
        twin.restore(fragment, version, params.clone(), momentum.clone())
    twin.step = state.step
    assert twin.versions == state.versions
    for each in (state, twin):
        each.commit(5, 1, gradient(1), 0.7, 0.9)
    assert torch.equal(state.params(1), twin.params(1))
    assert torch.equal(state.momentum(1), twin.momentum(1))


def test_host_copies_nothing_on_the_cpu():
    state = fresh()
    params, momentum = state.host(1)
    assert params.data_ptr() == state.params(1).data_ptr()
    assert momentum.data_ptr() == state.momentum(1).data_ptr()


# ---------------------------------------------------------------- merge.device


def with_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("name", "gpus", "device"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_devices(monkeypatch, name, gpus, device):
    with_gpus(monkeypatch, gpus)
    assert resolve_device(name) == torch.device(device)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2), ("tpu", 1), ("cpu:0", 1), ("cuda:", 1), ("cuda:x", 1), ("cuda:-1", 1)],
)
def test_devices_that_are_not_there(monkeypatch, name, gpus):
    with_gpus(monkeypatch, gpus)
    with pytest.raises(ValueError, match=f"merge.device='{name}'"):
        resolve_device(name)
