"""``python -m outbox_pipelines.launch``: the launcher's process, as run launchers start it."""

import argparse
import logging
import os
import sys

from outbox_pipelines.errors import OutboxError


def main(arguments: list[str]) -> int:
    """Execute an instance's runs in warm processes."""
    from outbox_pipelines.launch.service import serve, service_of

    parser = argparse.ArgumentParser(prog="python -m outbox_pipelines.launch", description=main.__doc__)
    parser.add_argument("--instance", default=os.environ.get("DAGSTER_HOME"), help="folder with dagster.yaml")
    parser.add_argument("--until-idle", action="store_true", help="end when no run came for a while")
    given = parser.parse_args(arguments)
    log_to_stderr()
    try:
        serve(
            service_of(given.instance),
            until_idle=given.until_idle,
            say=logging.getLogger("outbox_pipelines.launch").info,
        )
    except OutboxError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


def log_to_stderr() -> None:
    """A launcher's log: one line for what a person may have to know, and never an error for a full disk."""
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.WARNING, format="launcher: %(message)s", stream=sys.stderr, force=True)
    logging.getLogger("outbox_pipelines.launch").setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
