"""Certificates for tests of TLS."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl command to make certificates with"
)


@dataclass(frozen=True)
class Identity:
    """A certificate that vouches for itself, and its key."""

    certificate: Path
    private_key: Path


def make_identity(folder: Path, name: str) -> Identity:
    """A new one, valid for two days on this machine."""
    subprocess.run(
        (
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name} "
            f"-addext subjectAltName=IP:127.0.0.1,DNS:localhost -keyout {name}.key -out {name}.pem"
        ).split(),
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return Identity(folder / f"{name}.pem", folder / f"{name}.key")
