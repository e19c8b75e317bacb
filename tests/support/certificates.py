"""Certificates for tests, made on the spot: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NOW = datetime.datetime.now(datetime.UTC)
_DAY = datetime.timedelta(days=1)
_PEM, _PLAIN = serialization.Encoding.PEM, serialization.NoEncryption()


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates into ``folder``; ``ca`` is its own, to be trusted."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _subject(name)
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        own = _builder(self._subject, self._subject, self._key).add_extension(constraints, critical=True)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def issue(self, name: str, *hosts: str, age_days: int = 0, passphrase: bytes | None = None) -> Pair:
        """A certificate for ``hosts`` (names or addresses); ``age_days`` ago it was valid for a day."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_subject(name), self._subject, key, age_days)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        pair = Pair(self._folder / f"{self._name}.{name}.pem", self._folder / f"{self._name}.{name}.key")
        pair.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM))
        lock = serialization.BestAvailableEncryption(passphrase) if passphrase else _PLAIN
        pair.key.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, lock))
        return pair


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, age_days: int = 0
) -> x509.CertificateBuilder:
    start = _NOW - _DAY - age_days * _DAY
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + 2 * _DAY)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
