"""`model_signing sign key`, for machines without the package model-signing. Signs as that does; knows nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tests.control_plane.signatures.making import Maker


def main() -> None:
    parser = argparse.ArgumentParser(prog="model_signing")
    methods = parser.add_subparsers(required=True).add_parser("sign").add_subparsers(required=True)
    by_key = methods.add_parser("key")
    by_key.add_argument("model_path", type=Path)
    by_key.add_argument("--private_key", type=Path, required=True)
    by_key.add_argument("--signature", type=Path, required=True)
    arguments = parser.parse_args()
    key = load_pem_private_key(arguments.private_key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    files = {path.name: path.read_bytes() for path in arguments.model_path.iterdir() if path != arguments.signature}
    arguments.signature.write_bytes(Maker(key).sign(files))


if __name__ == "__main__":
    main()
