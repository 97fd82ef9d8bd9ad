"""A process that migrates: ``python -m tests.database.migrating_process URL``; says how many schemas it changed."""

import sys

from outbox_pipelines.database.engine import open_engine
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.settings import load_settings

if __name__ == "__main__":
    engine = open_engine(load_settings(), sys.argv[1], application_name="migrating_process")
    sys.stdout.write(f"{migrate(engine)}\n")
    engine.dispose()
