"""The shape of ``outbox.totals``: counters that never fall, and histograms of seconds."""

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Seconds up to which a bucket counts, as a Prometheus histogram has it; one more is for what takes longer.

The table holds a bucket's place in this order: it can be changed only with a migration.
"""


def bucket_sql(seconds: str) -> str:
    """SQL for the place of the bucket that counts a number of seconds, which is an SQL expression.

    ``width_bucket`` counts a value that is equal to a bound to the next bucket, and Prometheus to this one: the
    same with both turned round.
    """
    bounds = ", ".join(f"-{bound}" for bound in reversed(BUCKETS))
    return f"{len(BUCKETS)} - width_bucket(-({seconds})::float8, ARRAY[{bounds}]::float8[])"


def add_sql(rows: str) -> str:
    """SQL that adds to the totals the rows of a query: metric, label, outcome, bucket, count, seconds."""
    return f"""
        INSERT INTO outbox.totals AS known (metric, label, outcome, bucket, count, seconds) {rows}
        ON CONFLICT (metric, label, outcome, bucket) DO UPDATE
        SET count = known.count + excluded.count, seconds = known.seconds + excluded.seconds
    """
