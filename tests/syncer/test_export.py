"""``python -m syncer.export`` and ``python -m syncer.migrate``: what they show, write and refuse, and how they exit."""

import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from syncer.checkpoint.files import read_checkpoint, write_checkpoint, write_marker
from syncer.checkpoint.format import FragmentRecord, LedgerEntry, Snapshot
from syncer.config.plain_command import run_command
from syncer.export import USAGE, export
from syncer.migrate import USAGE as MIGRATE_USAGE
from syncer.migrate import migrate
from tests.support.checkpoint_bytes import CONTRACT, FINGERPRINT, V1, V2, V3, V3_BARE, content, f32, golden_snapshot
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

GROUPED = Layout(
    (
        Fragment(MergeMode.AVG, (Tensor("emb.weight", (2, 1)), Tensor("scale", ()))),
        Fragment(MergeMode.ISO, (Tensor("l0.w", (2, 3)),)),
    )
)
SINGLE = Layout((Fragment(MergeMode.AVG, (Tensor("w", (2,)),)), Fragment(MergeMode.RDA, (Tensor("b", ()),))))
LONG = Layout(tuple(Fragment(MergeMode.AVG, (Tensor(f"t{i}", (1,)),)) for i in range(20)))


@pytest.fixture
def grouped(tmp_path):
    """A V3 checkpoint of ``GROUPED`` and its layout file."""
    values = tuple(f32(*range(10 * i, 10 * i + numel)) for i, numel in enumerate(GROUPED.wire.numels))
    records = tuple(FragmentRecord(v, data, bytes(len(data))) for v, data in zip((3, 2), values, strict=True))
    ledger = (LedgerEntry(0, 3, 72, 4096),)
    write_checkpoint(tmp_path / "g.ckpt", Snapshot(3, 1, GROUPED.fingerprint, CONTRACT, 3, records, ledger))
    GROUPED.save(tmp_path / "layout.json")
    return tmp_path


@pytest.fixture
def files(tmp_path):
    """The golden files in every format, and layout files."""
    for name, data in (("v1", V1), ("v2", V2), ("v3", V3), ("bare", V3_BARE), ("cut", V3[:-1])):
        (tmp_path / name).write_bytes(data)
    SINGLE.save(tmp_path / "single.json")
    GROUPED.save(tmp_path / "grouped.json")
    LONG.save(tmp_path / "long.json")
    return tmp_path


def run(capsys, *words, command=export, usage=USAGE):
    """Exit status, output, errors of one command."""
    status = run_command(command, usage, [str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys, status, sentence, *words, command=export, usage=USAGE):
    got, out, err = run(capsys, *words, command=command, usage=usage)
    assert (got, out) == (status, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert err.endswith("\n")


# Inspection


def test_a_checkpoint_is_described(files, capsys):
    write_marker(files / "v3", 3)
    status, out, err = run(capsys, f"checkpoint={files / 'v3'}")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"checkpoint    {files / 'v3'} (format V3, 233 bytes)",
        "step          3",
        "final marker  step 3",
        "iso backend   scalar",
        f"fingerprint   {FINGERPRINT.hex()}",
        f"contract      {CONTRACT.hex()}",
        "fragment 0    version 3, 2 values",
        "fragment 1    version 2, 1 values",
        "learner 0     3 merges, 72 steps, 4096 tokens",
        "learner 1     2 merges, 48 steps, 2048 tokens",
    ]


def test_what_a_legacy_file_cannot_prove_is_said(files, capsys):
    _, v1, _ = run(capsys, f"checkpoint={files / 'v1'}")
    assert "iso backend   not recorded" in v1
    assert "a V1 file cannot prove its iso backend and its layout" in v1
    _, v2, _ = run(capsys, f"checkpoint={files / 'v2'}")
    assert "iso backend   scalar" in v2
    assert "fingerprint   not recorded" in v2
    assert "a V2 file cannot prove which layout it belongs to" in v2
    _, bare, _ = run(capsys, f"checkpoint={files / 'bare'}")
    assert "contract      not recorded" in bare
    assert "final marker  none" in bare
    assert "cannot prove" not in bare


def test_a_matching_layout_adds_names_to_the_description(grouped, capsys):
    status, out, _ = run(capsys, f"checkpoint={grouped / 'g.ckpt'}", f"layout={grouped / 'layout.json'}")
    assert status == 0
    assert "emb.weight [2, 1]" in out
    assert "scale []" in out


# Export


def test_export_with_a_layout_has_names_and_shapes(grouped, capsys):
    target = grouped / "model.safetensors"
    words = (f"checkpoint={grouped / 'g.ckpt'}", f"layout={grouped / 'layout.json'}", f"output={target}")
    assert run(capsys, *words)[0] == 0
    loaded = load_file(target)
    assert loaded["emb.weight"].tolist() == [[0], [1]]
    assert loaded["scale"].shape == ()
    assert loaded["scale"].item() == 2
    assert loaded["l0.w"].tolist() == [[10, 11, 12], [13, 14, 15]]
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3", "fingerprint": GROUPED.fingerprint.hex()}


def test_export_without_a_layout_has_one_flat_tensor_per_fragment(grouped, capsys):
    target = grouped / "model.safetensors"
    status, out, _ = run(capsys, f"checkpoint={grouped / 'g.ckpt'}", f"output={target}")
    assert status == 0
    assert "one flat tensor per fragment" in out
    loaded = load_file(target)
    assert set(loaded) == {"fragment.0.tensor.0", "fragment.1.tensor.0"}
    assert torch.equal(loaded["fragment.1.tensor.0"], torch.arange(10.0, 16.0))


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_a_legacy_export_compares_sizes_and_says_unverified(files, capsys, name):
    target = files / "model.safetensors"
    words = (f"checkpoint={files / name}", f"layout={files / 'single.json'}", f"output={target}")
    status, out, _ = run(capsys, *words)
    assert status == 0
    assert "cannot prove" in out
    assert {key: tensor.tolist() for key, tensor in load_file(target).items()} == {"w": [1.5, -2.0], "b": 4.0}
    with safe_open(target, "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "step": "3",
            "fingerprint": "unverified",
            "assumed_layout_fingerprint": SINGLE.fingerprint.hex(),
        }


@pytest.mark.parametrize("with_output", [False, True])
def test_layouts_that_do_not_fit_are_refused(files, capsys, with_output):
    more = [f"output={files / 'out'}"] if with_output else []
    refused(capsys, 1, SINGLE.fingerprint.hex(), f"checkpoint={files / 'v3'}", f"layout={files / 'single.json'}", *more)
    sizes = "its fragments have 2, 1 values, those of"
    refused(capsys, 1, sizes, f"checkpoint={files / 'v2'}", f"layout={files / 'grouped.json'}", *more)
    brief = "1, 1, … (20 fragments)"
    refused(capsys, 1, brief, f"checkpoint={files / 'v1'}", f"layout={files / 'long.json'}", *more)
    assert not (files / "out").exists()


def test_broken_files_are_one_line_and_exit_1(files, capsys):
    refused(capsys, 1, f"checkpoint {files / 'cut'}: ", f"checkpoint={files / 'cut'}")
    refused(capsys, 1, "No such file", f"checkpoint={files / 'none'}")
    refused(capsys, 1, "not JSON", f"checkpoint={files / 'v3'}", f"layout={files / 'v3'}")
    refused(capsys, 1, "cannot be written", f"checkpoint={files / 'v3'}", f"output={files / 'none' / 'x'}")
    (files / "v3.final").write_bytes(b"?")
    refused(capsys, 1, "not a marker", f"checkpoint={files / 'v3'}")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "checkpoint: missing"),
        (("checkpoint",), "'checkpoint' is not one of checkpoint=…, layout=…, output=…"),
        (("path=x",), "'path=x' is not one of"),
        (("checkpoint=",), "checkpoint: given without a value"),
        (("checkpoint=a", "checkpoint=b"), "checkpoint: given twice"),
        (("checkpoint=a", "--output=b"), "'--output=b' is not one of"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(capsys, words, sentence):
    refused(capsys, 2, sentence, *words)


def test_the_output_never_overwrites_an_input(files, capsys):
    (files / "link").symlink_to(files / "v3")
    for output in ("v3", "link", "../" + files.name + "/v3"):
        refused(capsys, 2, "would overwrite the checkpoint", f"checkpoint={files / 'v3'}", f"output={files / output}")
    words = (f"checkpoint={files / 'v2'}", f"layout={files / 'single.json'}", f"output={files / 'single.json'}")
    refused(capsys, 2, "would overwrite the layout", *words)
    assert (files / "v3").read_bytes() == V3


def test_paths_are_taken_to_the_letter(files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    for name in ("1e5", "null", "a=b", "{x}", "ü b"):
        (files / name).write_bytes(V3)
        assert run(capsys, f"checkpoint={name}")[0] == 0


def test_help_shows_the_usage(capsys):
    assert run(capsys, "--help") == (0, USAGE + "\n", "")


# Migration

MINE = {"fingerprint": FINGERPRINT.hex(), "backend": "scalar", "contract": CONTRACT.hex()}


def migration(files, source, **changes):
    values = {"checkpoint": files / source, **MINE, "output": files / "new.ckpt", **changes}
    return [f"{key}={value}" for key, value in values.items() if value is not None]


@pytest.mark.parametrize(("source", "backend"), [("v1", "scalar"), ("v1", "torch-svd"), ("v2", "scalar")])
def test_an_audited_legacy_file_becomes_v3(files, capsys, source, backend):
    words = migration(files, source, backend=backend)
    status, out, err = run(capsys, *words, command=migrate, usage=MIGRATE_USAGE)
    assert (status, err) == (0, "")
    assert f"V3 at step 3, migrated from {source.upper()}" in out
    if backend == "scalar":
        assert (files / "new.ckpt").read_bytes() == V3
    else:
        assert read_checkpoint(files / "new.ckpt").backend == 1
        assert content(read_checkpoint(files / "new.ckpt"))[2:] == content(golden_snapshot())[2:]


@pytest.mark.parametrize(
    ("source", "changes", "status", "sentence"),
    [
        ("v3", {}, 1, "is V3 already"),
        ("bare", {}, 1, "is V3 already"),
        ("cut", {}, 1, "follow the ledger"),
        ("v2", {"backend": "torch-svd"}, 1, "records iso backend scalar, not torch-svd"),
        ("v1", {"fingerprint": None}, 2, "fingerprint: missing"),
        ("v1", {"backend": None}, 2, "backend: missing"),
        ("v2", {"backend": None}, 2, "backend: missing"),
        ("v1", {"contract": None}, 2, "contract: missing"),
        ("v1", {"output": None}, 2, "output: missing"),
        ("v1", {"backend": "auto"}, 2, "backend: 'auto' is not one of scalar, torch-svd"),
        ("v1", {"fingerprint": "11" * 31}, 2, "is not 64 hexadecimal digits"),
        ("v1", {"contract": "zz" * 32}, 2, "is not 64 hexadecimal digits"),
        ("v1", {"contract": "1" * 63 + "\n"}, 2, "is not 64 hexadecimal digits"),
    ],
)
def test_migration_guesses_nothing(files, capsys, source, changes, status, sentence):
    words = migration(files, source, **changes)
    refused(capsys, status, sentence, *words, command=migrate, usage=MIGRATE_USAGE)
    assert not (files / "new.ckpt").exists()


@pytest.mark.parametrize("output", ["v1", "v3", "dangling"])
def test_migration_overwrites_nothing(files, capsys, output):
    (files / "dangling").symlink_to(files / "nowhere")
    words = migration(files, "v1", output=files / output)
    refused(capsys, 1, "exists already", *words, command=migrate, usage=MIGRATE_USAGE)
    assert (files / "v1").read_bytes() == V1
    assert (files / "v3").read_bytes() == V3


# As people start them


@pytest.mark.parametrize(
    ("module", "words", "status"),
    [
        ("syncer.export", ["checkpoint=v3"], 0),
        ("syncer.export", ["checkpoint=cut"], 1),
        ("syncer.export", ["nonsense"], 2),
        ("syncer.migrate", ["checkpoint=v1"], 2),
    ],
)
def test_the_commands_exit_as_documented_without_loading_torch(files, root, module, words, status):
    code = (
        f"import runpy, sys; sys.argv[1:] = {words!r}; sys.path.insert(0, {str(root)!r})\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "finally: assert not {'torch', 'numpy', 'hydra'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=files, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (1 if status else 0)
