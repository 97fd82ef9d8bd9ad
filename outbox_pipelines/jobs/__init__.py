"""The job outbox: background jobs of several kinds, each under a lease."""
