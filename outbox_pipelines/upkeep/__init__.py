"""Upkeep: retention, backlog snapshots and their checks, redrive, Dagster's own run history."""
