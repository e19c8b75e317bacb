import pytest

from tests.support.scripted_syncer import ScriptedSyncer


@pytest.fixture
def syncer():
    """A syncer that says what the test tells it to say."""
    with ScriptedSyncer() as syncer:
        yield syncer


@pytest.fixture
def quick_redial(monkeypatch):
    """The pauses are tested where they are decided; here only what happens after them counts."""
    monkeypatch.setattr("yeto_torch.learner.redial.FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("yeto_torch.learner.redial.LAST_PAUSE_S", 0.1)
