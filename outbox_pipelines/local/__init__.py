"""Everything on one machine: `outbox dev` and `outbox demo`."""
