"""Certificates that tests make: each has signed itself, so it is its own authority."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def make_certificate(file: Path, names: list[str], *, key_file: Path | None = None, password: str = "") -> None:
    """Write a certificate for ``names`` to ``file``, and its key to the same file or to ``key_file``."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(list(map(x509.DNSName, names))), critical=False)
        .sign(key, hashes.SHA256())
    )
    cipher: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        cipher = serialization.BestAvailableEncryption(password.encode())
    pem = serialization.Encoding.PEM
    own_key = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, cipher)
    certificate = made.public_bytes(pem)
    if key_file is None:
        file.write_bytes(certificate + own_key)
    else:
        key_file.write_bytes(own_key)
        file.write_bytes(certificate)
