"""The sample kinds: ``OUTBOX_KINDS=outbox_pipelines.academic.kinds:KINDS``."""

from outbox_pipelines.academic.automatic_timetable import AUTOMATIC_TIMETABLE
from outbox_pipelines.academic.makeup_exams import MAKEUP_EXAMS
from outbox_pipelines.academic.timetable_publishing import TIMETABLE_PUBLISHING
from outbox_pipelines.jobs.kinds import JobKind

KINDS: tuple[JobKind, ...] = (AUTOMATIC_TIMETABLE, TIMETABLE_PUBLISHING, MAKEUP_EXAMS)
