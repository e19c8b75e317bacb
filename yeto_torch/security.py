"""A learner's secrets: ``tls=`` and the key that signs HELLO, as arguments or from the YETO_* environment.

Decides which forms are legal and which file is meant. It must not show a key: an error names the argument or variable
and the path, never what a file holds.

    tls=None          the environment: YETO_TLS_CA, YETO_TLS_CERT, YETO_TLS_KEY; none of them set, no TLS
    tls=True          TLS with the files of the environment; without YETO_TLS_CA the system's authorities are trusted
    tls=False         no TLS, whatever the environment says
    tls="ca.pem"      TLS, the syncer's certificate must come from this authority (or be it)
    tls={...}         any of ca, cert and key (this learner's own, together), server_hostname (if the address is not in
                      the certificate)

Source: rulings §2.9; docs/quickstart.md, "Over the internet".
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from yeto_torch.wire.transport.tls import ClientTls, TlsFileError, client_context

Tls: TypeAlias = bool | str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None

_VARIABLES = {"ca": "YETO_TLS_CA", "cert": "YETO_TLS_CERT", "key": "YETO_TLS_KEY"}
_ARGUMENTS = {name: f"tls {name}" for name in _VARIABLES}
_LARGEST_KEY_BYTES = 65_536


def tls_from(environment: Mapping[str, str], given: Tls) -> Tls:
    """``tls=`` as the environment completes it. Raises ValueError naming the variable."""
    files = {name: environment[variable] for name, variable in _VARIABLES.items() if environment.get(variable)}
    if not files or given not in (None, True):
        return given
    _context(files, _VARIABLES)
    return files


def client_tls(tls: object, host: str) -> ClientTls | None:
    """How to dial ``host``; None without TLS. Raises ValueError naming the argument and what is legal."""
    if tls is None or tls is False:
        return None
    if tls is True:
        tls = {}
    elif isinstance(tls, (str, os.PathLike)):
        tls = {"ca": tls}
    if not isinstance(tls, Mapping) or not all(isinstance(value, (str, os.PathLike)) for value in tls.values()):
        raise ValueError(f"tls={tls!r}: must be True, a path to a CA file, or a mapping of {_legal()} to text")
    for name in tls:
        if name not in (*_VARIABLES, "server_hostname"):
            raise ValueError(f"tls={{{name!r}: ...}}: must be one of {_legal()}")
    name = str(tls.get("server_hostname", host.partition("%")[0]))  # a zone is no part of an address's name
    context = _context({key: value for key, value in tls.items() if key in _VARIABLES}, _ARGUMENTS)
    try:
        return ClientTls(context, name)
    except ValueError as error:
        raise ValueError(f"tls server_hostname={name!r}: must be a host name or an address") from error


def read_key(variable: str, path: str) -> bytes:
    """The HMAC key in a file, less one trailing newline. Raises ValueError, which never shows the key."""
    try:
        with Path(path).open("rb") as file:
            key = file.read(_LARGEST_KEY_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{variable}={path!r}: cannot be read: {error.strerror or error}") from error
    if len(key) > _LARGEST_KEY_BYTES:
        raise ValueError(f"{variable}={path!r}: must be a file of at most {_LARGEST_KEY_BYTES} bytes")
    key = key.removesuffix(b"\n")
    if not key:
        raise ValueError(f"{variable}={path!r}: must be a file that holds a key, but it is empty")
    return key


def _legal() -> str:
    return ", ".join((*_VARIABLES, "server_hostname"))


def _context(files: Mapping[str, str | os.PathLike[str]], names: Mapping[str, str]) -> ssl.SSLContext:
    paths = {name: Path(value) for name, value in files.items()}
    for one, other in (("cert", "key"), ("key", "cert")):
        if one in paths and other not in paths:
            raise ValueError(f"{names[one]}={str(paths[one])!r}: must be given together with {names[other]}")
    try:
        return client_context(paths.get("ca"), paths.get("cert"), paths.get("key"))
    except TlsFileError as error:
        raise ValueError(f"{names[error.which]}={str(paths[error.which])!r}: must be {error.legal}") from error
