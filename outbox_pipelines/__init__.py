"""Drain transactional outboxes in PostgreSQL with Dagster, with proof."""

__version__ = "0.1.0"
