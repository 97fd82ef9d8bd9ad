"""``python -m outbox_pipelines.cli``: the command ``outbox``."""

from outbox_pipelines.cli import main

if __name__ == "__main__":
    main()
