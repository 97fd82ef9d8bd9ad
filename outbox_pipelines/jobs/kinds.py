"""Kinds of background jobs: what their handler is, and how it is treated."""

import inspect
import keyword
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from outbox_pipelines.errors import OutboxError
from outbox_pipelines.jobs.domain import Domain, TableDomain
from outbox_pipelines.lease.backoff import backoff_seconds

if TYPE_CHECKING:
    from outbox_pipelines.jobs.context import JobContext

MOST_CONSUMERS = 16
SHORTEST_LEASE_SECONDS = 10.0
LONGEST_SECONDS = 7 * 24 * 3600.0
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_RESERVED = frozenset(keyword.kwlist) | frozenset(
    {
        "run_background_job",
        "arg_dict",
        "bool",
        "conf",
        "config",
        "context",
        "dict",
        "float",
        "input",
        "input_arg_dict",
        "int",
        "meta",
        "output",
        "output_arg_dict",
        "str",
        "type",
        "tenant_flush",
        "fleet_flush",
        "training_outbox",
        "job_recovery",
    }
)
"""Names that Dagster does not allow, or whose job or sensor there would have the name of one of ours."""

_DOMAIN_METHODS = ("standing", "close", "reopen", "note_step", "live_jobs")

Handler = Callable[["JobContext"], object]


class InvalidKind(OutboxError):
    """A kind that cannot be registered; the text has the remedy."""


class UnknownKind(OutboxError):
    """No kind of that name is registered here."""


def _is_number(value: object, least: float, most: float) -> bool:
    # True is an int, too.
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _runs_nothing(called: object) -> bool:
    """Whether calling it makes an object and leaves its code for later."""
    return any(
        is_one(called)
        for is_one in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    )


@dataclass(frozen=True)
class Backoff:
    """Seconds until a failed job is tried again: doubles from ``first`` to ``maximum``, with jitter."""

    first: float = 2.0
    maximum: float = 300.0

    def __post_init__(self) -> None:
        if not (_is_number(self.first, 0, LONGEST_SECONDS) and _is_number(self.maximum, self.first, LONGEST_SECONDS)):
            raise InvalidKind(
                f"Backoff(first={self.first}, maximum={self.maximum}): needed is 0 <= first <= maximum <= a week"
            )

    def seconds(self, failures: int) -> float:
        """The wait after that many failed attempts."""
        return backoff_seconds(failures, first=self.first, maximum=self.maximum)


@dataclass(frozen=True)
class JobKind:
    """A kind of background job.

    >>> JobKind("timetable", make_timetable, consumers=4, timeout=600)         # doctest: +SKIP

    Raises:
        InvalidKind: naming what is wrong and what is allowed.
    """

    name: str
    """Lower case letters, digits and underscores; also the name of its job in Dagster."""

    handler: Handler
    """Called with a :class:`JobContext` for each attempt; returns nothing, and raises to fail."""

    consumers: int = 2
    """How many jobs of the kind are worked on at a time: runs in Dagster, threads in a worker."""

    lease: float = 120.0
    """Seconds after which a job whose worker is silent is given to another; at least 10."""

    attempts: int = 5
    """Attempts after which a job is given up."""

    backoff: Backoff = Backoff()

    timeout: float = 3600.0
    """Seconds after which an attempt is ended; it counts as failed."""

    domain: Domain | None = None
    """The application's own table of these jobs, if it has one."""

    def __post_init__(self) -> None:
        def refuse(what: str) -> InvalidKind:
            return InvalidKind(f"job kind {self.name!r}: {what}")

        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise refuse("a name is 1 to 63 lower case letters, digits and underscores, and begins with a letter")
        if self.name in _RESERVED or self.name.endswith("_sensor"):
            raise refuse("Dagster does not allow that name, or would have it twice; choose another")
        if not callable(self.handler):
            raise refuse("handler must be a function that takes a JobContext")
        if any(_runs_nothing(called) for called in (self.handler, type(self.handler).__call__)):
            raise refuse("handler must be a plain function: call asyncio.run(...) in it for a coroutine")
        if not isinstance(self.consumers, int) or not _is_number(self.consumers, 1, MOST_CONSUMERS):
            raise refuse(f"consumers={self.consumers!r}; allowed are 1 to {MOST_CONSUMERS}")
        if not _is_number(self.lease, SHORTEST_LEASE_SECONDS, LONGEST_SECONDS):
            raise refuse(
                f"lease={self.lease!r}; allowed are {SHORTEST_LEASE_SECONDS:.0f} s to a week, since a heartbeat "
                "comes every 5 s at most and needs a second chance"
            )
        if not isinstance(self.attempts, int) or not _is_number(self.attempts, 1, 1_000):
            raise refuse(f"attempts={self.attempts!r}; allowed are 1 to 1,000")
        if not _is_number(self.timeout, 0.1, LONGEST_SECONDS):
            raise refuse(f"timeout={self.timeout!r}; allowed are 0.1 s to a week")
        if not isinstance(self.backoff, Backoff):
            raise refuse(f"backoff={self.backoff!r}; give a Backoff, Backoff(first=2, maximum=300)")
        lacking = [name for name in _DOMAIN_METHODS if not callable(getattr(self.domain, name, None))]
        if self.domain is not None and lacking:
            raise refuse(f"domain={self.domain!r} has no method {lacking[0]!r}; give a TableDomain, for example")
        try:
            inspect.signature(self.handler).bind(None)
        except TypeError as error:
            raise refuse(f"handler must take one argument, the JobContext ({error})") from None
        except ValueError:
            # A function in C tells no signature.
            return


class Kinds(Mapping[str, JobKind]):
    """The registered kinds, by name.

    Raises:
        InvalidKind: for a name twice, or something that is no kind.
    """

    def __init__(self, kinds: Iterable[JobKind] = ()) -> None:
        self._kinds: dict[str, JobKind] = {}
        for kind in kinds:
            if not isinstance(kind, JobKind):
                raise InvalidKind(f"kinds must be JobKind objects, not {type(kind).__name__}: {kind!r}")
            if kind.name in self._kinds:
                raise InvalidKind(f"job kind {kind.name!r} is registered twice: give one of them another name")
            _refuse_shared_table(kind, self._kinds.values())
            self._kinds[kind.name] = kind

    def __getitem__(self, name: str) -> JobKind:
        return self._kinds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def named(self, name: str) -> JobKind:
        """The kind of that name.

        Raises:
            UnknownKind: listing those that there are.
        """
        if name not in self._kinds:
            there = ", ".join(self._kinds) or "none; name them with OUTBOX_KINDS=module:attribute"
            raise UnknownKind(f"no job kind {name!r} is registered here (registered: {there})")
        return self._kinds[name]


def _refuse_shared_table(kind: JobKind, others: Iterable[JobKind]) -> None:
    """At start each kind looks for its table's jobs without a message: of another kind's they would make doubles."""
    for other in others:
        ours, theirs = kind.domain, other.domain
        if not isinstance(ours, TableDomain) or not isinstance(theirs, TableDomain) or ours.table != theirs.table:
            continue
        if ours.where is None or theirs.where is None or ours.where == theirs.where:
            raise InvalidKind(
                f"job kinds {other.name!r} and {kind.name!r} share the domain table {ours.table!r}: say with "
                "TableDomain(where=...) which of its rows are whose"
            )


def load_kinds(place: str | None) -> Kinds:
    """The kinds that ``OUTBOX_KINDS`` names, as ``module:attribute``; none when it is not set.

    Raises:
        InvalidKind: when there is nothing of the kind.
    """
    if not place:
        return Kinds()
    module_name, _, attribute = place.partition(":")
    if not module_name or not attribute:
        raise InvalidKind(f"OUTBOX_KINDS={place}: name it as module:attribute, school.jobs:KINDS")
    if str(Path.cwd()) not in sys.path:
        # As `python -m` has it: the project that the command is called in.
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InvalidKind(
            f"OUTBOX_KINDS={place}: there is no module {error.name!r}; install it, or set PYTHONPATH"
        ) from None
    found = getattr(module, attribute, None)
    if found is None:
        raise InvalidKind(f"OUTBOX_KINDS={place}: module {module_name!r} has no {attribute!r}")
    if isinstance(found, JobKind) or not isinstance(found, Iterable):
        raise InvalidKind(f"OUTBOX_KINDS={place}: it must be a list of JobKind objects, not {type(found).__name__}")
    return found if isinstance(found, Kinds) else Kinds(found)
