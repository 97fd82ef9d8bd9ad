"""A process that uses an embedded server: ``python -m tests.database.embedded_user FOLDER``.

Says where the server's socket is, keeps the server until its standard input ends, then leaves.
"""

import sys
from pathlib import Path

from outbox_pipelines.database.embedded import EmbeddedServer

if __name__ == "__main__":
    with EmbeddedServer(Path(sys.argv[1]), options={"fsync": "off"}) as server:
        sys.stdout.write(f"{server.socket_folder}\n")
        sys.stdout.flush()
        sys.stdin.read()
