"""The launcher's protection: what the flags, the syncer's keys and the environment give to whom."""

import pytest

from yeto_torch.run import parse


@pytest.fixture
def files(tmp_path):
    paths = {name: tmp_path / name for name in ("key", "cert", "private", "ca", "train.py")}
    for path in paths.values():
        path.write_text("x\n")
    return paths


def launched(files, *arguments):
    return parse(["--learners", "2", *map(str, arguments), "total_steps=1", "--", str(files["train.py"])])


def keys(launch):
    words = (word.partition("=") for word in launch.syncer_command() if word.startswith("security."))
    return {key: value for key, _, value in words}


def variables(launch):
    protected = ("YETO_HMAC", "YETO_TLS")
    return {name: value for name, value in launch.environment("run").items() if name.startswith(protected)}


def test_without_any_nothing_is_protected(files):
    assert keys(launched(files)) == variables(launched(files)) == {}


def test_the_flags_reach_the_syncer_and_the_learners(files):
    launch = launched(files, "--hmac-key-file", files["key"])
    assert keys(launch) == {"security.hmac_key_file": str(files["key"])}
    assert variables(launch) == {"YETO_HMAC_KEY_FILE": str(files["key"])}
    tls = ("--tls-cert", files["cert"], "--tls-key", files["private"])
    launch = launched(files, *tls)
    assert keys(launch) == {"security.tls_cert": str(files["cert"]), "security.tls_key": str(files["private"])}
    assert variables(launch) == {"YETO_TLS_CA": str(files["cert"])}, "nobody else has signed it"
    assert variables(launched(files, *tls, "--tls-ca", files["ca"])) == {"YETO_TLS_CA": str(files["ca"])}


def test_the_syncers_own_keys_reach_the_learners_too(files):
    own = (f"security.hmac_key_file={files['key']}", f"security.tls_cert='{files['cert']}'")
    launch = launched(files, *own, f"security.tls_key={files['private']}")
    assert variables(launch) == {"YETO_HMAC_KEY_FILE": str(files["key"]), "YETO_TLS_CA": str(files["cert"])}
    assert len([word for word in launch.syncer_command() if word.startswith("security.")]) == 3


def test_relative_files_and_the_environment(files, monkeypatch):
    monkeypatch.chdir(files["key"].parent)
    assert variables(launched(files, "--hmac-key-file", "key")) == {"YETO_HMAC_KEY_FILE": str(files["key"])}
    monkeypatch.setenv("YETO_HMAC_KEY_FILE", "key")
    assert keys(launched(files)) == {"security.hmac_key_file": str(files["key"])}
    assert keys(launched(files, "--hmac-key-file", "ca")) == {"security.hmac_key_file": str(files["ca"])}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--hmac-key-file", "{none}"], "--hmac-key-file {none}: no such file"),
        (["security.hmac_key_file={none}"], "--hmac-key-file {none}: no such file"),
        (["--tls-cert", "{cert}"], "--tls-cert {cert}: --tls-key is missing"),
        (["--tls-key", "{private}"], "--tls-key {private}: --tls-cert is missing"),
        (["--tls-ca", "{ca}"], "--tls-ca {ca}: --tls-cert is missing"),
        (["--hmac-key-file", "{key}", "security.hmac_key_file={key}"], "one of them is enough"),
    ],
)
def test_what_cannot_work_is_said_at_once(arguments, told, files, tmp_path):
    names = {**files, "none": tmp_path / "none"}
    with pytest.raises(ValueError) as caught:
        launched(files, *(text.format(**names) for text in arguments))
    assert told.format(**names) in str(caught.value)
