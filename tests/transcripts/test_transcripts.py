"""Every conversation in this folder still goes as it is written. ``pytest tests/transcripts --rewrite`` stores anew."""

from pathlib import Path

import pytest

from tests.support.transcript_player import Learner, Syncer, play

HERE = Path(__file__).parent
MACHINES = {"session": Learner}


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_the_conversation_goes_as_written(path, rewrite):
    written = path.read_text(encoding="utf-8")
    said = play(written, MACHINES.get(path.stem, Syncer)())
    if rewrite:
        path.write_text(said, encoding="utf-8")
    else:
        assert said == written


def test_a_changed_answer_is_noticed():
    text = (HERE / "rounds.txt").read_text(encoding="utf-8")
    assert "attempt 2" in text
    changed = text.replace("attempt 2", "attempt 3")
    assert play(changed, Syncer()) == text != changed
