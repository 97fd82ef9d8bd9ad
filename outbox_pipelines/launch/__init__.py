"""How Dagster is run: the instance's settings."""
