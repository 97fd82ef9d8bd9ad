"""The background jobs of a school system, as sample kinds: ``outbox_pipelines.academic.kinds:KINDS``."""
