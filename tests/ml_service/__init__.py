"""The reference ML service: what it learns, what it keeps, and how it answers."""
