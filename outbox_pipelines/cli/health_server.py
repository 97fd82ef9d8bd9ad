"""``outbox health-server``."""

import errno
import logging
import socket
from typing import Annotated

import typer

from outbox_pipelines.cli.output import opened_database
from outbox_pipelines.errors import OutboxError


def health_server(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 9464,
) -> None:
    """Answer /health/live, /health/ready, /health/messaging and /metrics until it is interrupted."""
    from outbox_pipelines.observe.server import serve
    from outbox_pipelines.settings import load_settings

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _refuse_taken(host, port)
    with opened_database(migrated=False) as engine:
        serve(
            engine,
            load_settings(),
            host=host,
            port=port,
            on_ready=lambda bound: typer.echo(f"health server: http://{host}:{bound}/health/ready and /metrics"),
        )


def _refuse_taken(host: str, port: int) -> None:
    """One line instead of a log: uvicorn ends the process by itself."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address[4])
    except OSError as error:
        taken = " (is another one running? choose one with --port)" if error.errno == errno.EADDRINUSE else ""
        raise OutboxError(f"cannot listen on {host}:{port}: {error.strerror or error}{taken}") from None
