"""Leases: one worker at a time, fenced by a token."""
