"""Health and metrics over HTTP, read from the database: what short-lived runs did counts, too."""
