"""A run folder may be called anything: its name reaches the syncer through Hydra's grammar unchanged."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from yeto_torch.launcher.folder import RunFolder
from yeto_torch.launcher.launch import Launch, key_of


@example("läufe")
@example("a${b}c")
@given(st.text(st.characters(exclude_categories=["C"]), min_size=1) | st.text("\\'\"${}ab[],:= ", min_size=1))
def test_any_folder_reaches_the_syncer(tmp_path_factory, text):
    folder = RunFolder(tmp_path_factory.getbasetemp() / text.replace("/", "_"))
    words = {key_of(word): word for word in Launch(folder, 2, ("train.py",)).syncer_command()[3:]}
    value = OverridesParser.create().parse_override(words["tape.path"]).value()
    assert OmegaConf.create({"path": value}).path == str(folder.tape)
