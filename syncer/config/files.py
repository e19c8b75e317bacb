"""Are the files a configuration names usable, each for itself and all together?

Decides: no two keys name one file; what will be written has a folder that permits it; the HMAC key can be read;
certificates and key belong together. It only looks: nothing is created, opened for writing or removed, and no files
but those of ``security`` are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from syncer.config.rules import shown, wrong
from yeto_torch.wire.transport.tls import TlsFileError, server_context

HMAC_KEY = "security.hmac_key_file"
_TLS = {"cert": "security.tls_cert", "key": "security.tls_key", "ca": "security.tls_client_ca"}
_READ = ("final.layout_path", HMAC_KEY, *_TLS.values())
_REPLACED = ("listen.address_file", "checkpoint.path", "final.state_path")  # by a rename within their folder
_APPENDED = ("tape.path",)
_LARGEST_KEY_BYTES = 65_536


def check_files(paths: Mapping[str, Path | None]) -> None:
    """Check the paths of all file keys (dotted key -> path or None). Raises ValueError naming the key and the path."""
    used: dict[str, str] = {}
    for key in (*_REPLACED, *_APPENDED, *_READ):
        path = paths[key]
        if path is None:
            continue
        try:
            _check_file(key, path)
            identity = os.path.realpath(path)
        except OSError as error:  # a name too long, a folder that may not be searched
            raise wrong(key, path, f"a usable path ({error.strerror})") from error
        other = used.setdefault(identity, key)
        if other != key and not {key, other} <= set(_TLS.values()):  # one PEM file may hold several things
            raise wrong(key, path, f"a file of its own, but it is also that of {other}")
        if key == "checkpoint.path":
            used.setdefault(identity + ".final", "checkpoint.path's marker")


def _check_file(key: str, path: Path) -> None:
    folder = path.parent
    if path.is_dir():
        raise wrong(key, path, "a file, but it is a folder")
    if not folder.is_dir():
        raise wrong(key, path, f"in an existing folder, but {shown(folder)} is none")
    if key in _READ:
        return
    if key in _APPENDED and path.exists():
        if not os.access(path, os.R_OK | os.W_OK):
            raise wrong(key, path, "a file this user may read and write")
    elif not os.access(folder, os.W_OK | os.X_OK):
        raise wrong(key, path, f"in a folder this user may write to, unlike {shown(folder)}")


def read_hmac_key(path: Path | None) -> bytes | None:
    """The file's bytes less one trailing newline. Raises ValueError that names the path and never holds the key."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            key = file.read(_LARGEST_KEY_BYTES + 1)
    except OSError as error:
        raise wrong(HMAC_KEY, path, f"a readable file ({error.strerror})") from error
    if len(key) > _LARGEST_KEY_BYTES:
        raise wrong(HMAC_KEY, path, f"a file of at most {_LARGEST_KEY_BYTES} bytes")
    key = key.removesuffix(b"\n")
    if not key:
        raise wrong(HMAC_KEY, path, "a file that holds a key, but it is empty")
    return key


def check_tls(paths: Mapping[str, Path | None]) -> None:
    """Certificate, key and authority can serve TLS together. Raises ValueError naming the key and the path."""
    cert, key, authority = (paths[name] for name in _TLS.values())
    for name, other in (("cert", "key"), ("key", "cert"), ("ca", "cert")):
        path = paths[_TLS[name]]
        if path is not None and paths[_TLS[other]] is None:
            raise wrong(_TLS[name], path, f"null while {_TLS[other]} is null: TLS needs both")
    if cert is None or key is None:
        return
    try:
        server_context(cert, key, authority)
    except TlsFileError as error:
        name = _TLS[error.which]
        raise wrong(name, paths[name], error.legal) from error
