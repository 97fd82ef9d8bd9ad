"""A destination in memory: the smallest sink a user could write."""

from collections.abc import Sequence

from outbox_pipelines.training.sink import Batch, Health, OutboxRow, Verdict


class MemorySink:
    """Keeps the rows it is sent."""

    target = "memory"
    max_call_bytes = 1_000_000

    def __init__(self) -> None:
        self.rows: list[OutboxRow] = []

    def call_bytes(self, rows: Sequence[OutboxRow]) -> int:
        """The characters, near enough for memory."""
        return sum(len(row.example) for row in rows)

    def send(self, batch: Batch) -> Verdict:
        """Accept all."""
        self.rows += batch.rows
        return Verdict()

    def probe(self) -> Health:
        """Memory is always there."""
        return Health(reachable=True, detail="SERVING")

    def close(self) -> None:
        """Nothing to free."""
