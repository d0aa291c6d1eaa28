"""Makes the bundles beside this file, once: `python make.py` in an environment with the package model-signing 1.1.

They show that signatures of that tool are read; tests make all others themselves. The keys are thrown away.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HERE = Path(__file__).resolve().parent
ADAPTER = HERE / "adapter"  # with a README.md, which is signed and not uploaded
CURVES = {"p256": ec.SECP256R1(), "p384": ec.SECP384R1(), "p521": ec.SECP521R1()}
BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for curve_name, curve in CURVES.items():
            key = ec.generate_private_key(curve)
            (HERE / f"{curve_name}.pub").write_bytes(
                key.public_key().public_bytes(
                    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
                )
            )
            sign("key", f"{curve_name}.sig", "--private_key", str(write_key(scratch / curve_name, key)))
        make_certificate_bundle(scratch)


def make_certificate_bundle(scratch: Path) -> None:
    root_key, middle_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    root = certificate("Motet's test root", root_key, "Motet's test root", root_key, is_ca=True)
    middle = certificate("Motet's test intermediate", middle_key, "Motet's test root", root_key, is_ca=True)
    leaf = certificate("Motet's test signer", key, "Motet's test intermediate", middle_key, is_ca=False)
    paths = [scratch / "leaf.pem", scratch / "middle.pem"]
    for path, made in zip(paths, (leaf, middle), strict=True):
        path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (HERE / "root.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    private_key = str(write_key(scratch / "leaf", key))
    chain = ("--signing_certificate", str(paths[0]), "--certificate_chain", str(paths[1]))
    sign("certificate", "certificate.sig", "--private_key", private_key, *chain)


def certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey, *, is_ca: bool
) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGIN)
        .not_valid_after(BEGIN + datetime.timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


def write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


def sign(method: str, file: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "model_signing", "sign", method, str(ADAPTER), "--signature", str(HERE / file)]
    subprocess.run([*command, *arguments], check=True)


if __name__ == "__main__":
    main()
