"""``tls=``, the key that signs HELLO, and their environment: every form, every wrong file, and nothing shown.

Source: docs/quickstart.md, "Over the internet".
"""

import ssl

import pytest

from tests.support.certificates import Authority
from yeto_torch.config import LearnerConfig
from yeto_torch.wire.transport.tls import ClientTls

GOOD = {"syncer": "syncer.example:1", "learner_id": 0, "run_id": "r"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """ca, cert and key of one authority, and a file of junk."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(folder)
    pair = authority.issue("learner")
    (folder / "junk").write_text("junk\n")
    return {"ca": authority.ca, "cert": pair.cert, "key": pair.key, "junk": folder / "junk", "none": folder / "none"}


def resolved(environment=(), **arguments) -> ClientTls | None:
    return LearnerConfig.resolve(dict(environment), **{**GOOD, **arguments}).client_tls


def trusted(tls):
    return len(tls.context.get_ca_certs())


def test_every_form_of_tls(files):
    assert resolved() is None
    assert resolved(tls=False) is None
    for form in (str(files["ca"]), files["ca"], {"ca": files["ca"]}, {"ca": str(files["ca"])}):
        tls = resolved(tls=form)
        assert trusted(tls) == 1
        assert tls.server_hostname == "syncer.example"
        assert tls.context.verify_mode is ssl.CERT_REQUIRED
        assert tls.context.check_hostname
        assert tls.context.minimum_version is ssl.TLSVersion.TLSv1_3
    for system in (True, {}, {"cert": files["cert"], "key": str(files["key"])}):
        assert resolved(tls=system).context.verify_mode is ssl.CERT_REQUIRED
    assert resolved(tls={"server_hostname": "other.example"}).server_hostname == "other.example"


@pytest.mark.parametrize(
    ("address", "name"), [("[::1]:5", "::1"), ("[fe80::1%eth0]:5", "fe80::1"), ("10.0.0.1:5", "10.0.0.1")]
)
def test_an_address_is_a_name_too(address, name, files):
    assert resolved(syncer=address, tls=files["ca"]).server_hostname == name


def test_the_environment_turns_tls_on_and_arguments_win(files):
    environment = {f"YETO_TLS_{name.upper()}": str(files[name]) for name in ("ca", "cert", "key")}
    assert trusted(resolved(environment)) == 1
    assert trusted(resolved({"YETO_TLS_CA": str(files["ca"])})) == 1
    assert trusted(resolved(environment, tls=True)) == 1, "True alone leaves the files to the environment"
    assert resolved(environment, tls=False) is None
    assert resolved(environment, tls={"server_hostname": "b.example"}).server_hostname == "b.example"
    resolved({"YETO_TLS_CA": str(files["none"])}, tls=files["ca"])
    assert resolved({"YETO_TLS_CA": ""}) is None


@pytest.mark.parametrize(
    ("tls", "told"),
    [
        ("{none}", "tls ca='{none}': must be a readable file"),
        ("{junk}", "tls ca='{junk}': must be a file with a certificate in PEM format"),
        ({"cert": "{cert}"}, "tls cert='{cert}': must be given together with tls key"),
        ({"key": "{key}"}, "tls key='{key}': must be given together with tls cert"),
        ({"cert": "{junk}", "key": "{key}"}, "tls cert='{junk}': must be a file with a certificate in PEM"),
        ({"cert": "{cert}", "key": "{ca}"}, "tls key='{ca}': must be a private key in PEM format"),
        ({"password": "x"}, "tls={'password': ...}: must be one of ca, cert, key, server_hostname"),
        ({"server_hostname": ""}, "tls server_hostname='': must be a host name or an address"),
        ([], "tls=[]: must be True, a path to a CA file, or a mapping of ca, cert, key, server_hostname"),
    ],
)
def test_a_wrong_tls_is_named_with_its_file(tls, told, files):
    def filled(value):
        if isinstance(value, dict):
            return {name: filled(inner) for name, inner in value.items()}
        return value.format(**files) if isinstance(value, str) else value

    with pytest.raises(ValueError) as caught:
        resolved(tls=filled(tls))
    for name, path in files.items():
        told = told.replace(f"{{{name}}}", str(path))
    assert told in str(caught.value)


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
def test_a_wrong_file_of_the_environment_is_named_by_its_variable(name, files):
    for file in ("junk", "none"):
        given = {"ca": files["ca"], "cert": files["cert"], "key": files["key"], name: files[file]}
        with pytest.raises(ValueError) as caught:
            resolved({f"YETO_TLS_{which.upper()}": str(path) for which, path in given.items()})
        assert str(caught.value).startswith(f"YETO_TLS_{name.upper()}='{files[file]}': must be ")
    with pytest.raises(ValueError) as caught:
        resolved({"YETO_TLS_CERT": str(files["cert"])})
    assert str(caught.value) == f"YETO_TLS_CERT='{files['cert']}': must be given together with YETO_TLS_KEY"


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "cannot be read"), (b"", "it is empty"), (b"\n", "it is empty"), (b"s3cr3t" * 20_000, "at most")],
)
def test_a_key_file_that_cannot_serve_is_named_and_never_shown(content, told, tmp_path):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        LearnerConfig.resolve({"YETO_HMAC_KEY_FILE": str(file)}, **GOOD)
    assert str(caught.value).startswith(f"YETO_HMAC_KEY_FILE='{file}': ")
    assert told in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
