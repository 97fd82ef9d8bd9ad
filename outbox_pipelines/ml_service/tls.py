"""The server's certificate, and whose clients it lets in."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc


class TlsError(ValueError):
    """The TLS files cannot be used; the text names them and says why."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. Read once, when the server starts."""

    #: The server's certificate, followed by its intermediates.
    certificate: Path
    #: The certificate's private key, without a passphrase.
    private_key: Path
    #: Clients must show a certificate signed by one of these authorities; None lets all clients in.
    client_ca: Path | None = None

    @classmethod
    def of(cls, certificate: Path | None, private_key: Path | None, client_ca: Path | None) -> TlsFiles | None:
        """The files as options give them: all None is no TLS. Raises `TlsError` for half a pair."""
        if certificate is None and private_key is None:
            if client_ca is not None:
                # Without a certificate there is no TLS, and the authority would silently guard nothing.
                raise TlsError("a client CA needs a certificate and a private key beside it")
            return None
        if certificate is None or private_key is None:
            raise TlsError("TLS needs both a certificate and a private key")
        return cls(certificate, private_key, client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Reads the files for gRPC. Raises `TlsError` for files it could not serve with."""
        # gRPC takes nearly any bytes and then fails every handshake; OpenSSL says what is wrong now.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.private_key, password="")
        except OSError as error:  # ssl.SSLError is one
            raise TlsError(
                f"the certificate {self.certificate} and the key {self.private_key} cannot be used: {error}"
            ) from error
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                raise TlsError(f"the client CA {self.client_ca} cannot be used: {error}") from error
        return grpc.ssl_server_credentials(
            [(self.private_key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=None if self.client_ca is None else self.client_ca.read_bytes(),
            require_client_auth=self.client_ca is not None,
        )
