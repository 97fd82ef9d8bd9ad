"""Rows kept as a Parquet file before they are deleted: one file for each kind of row and day.

A file is written beside its place, read back and compared, and only then put there. Only what
stands in it is deleted. A purge that was cut off finds the file, adds what is not in it yet, and goes on.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine

from outbox_pipelines.errors import OutboxError
from outbox_pipelines.upkeep.purge import Aged, Key

if TYPE_CHECKING:
    import pyarrow

_ROWS_AT_ONCE = 5_000


class ArchiveFailed(OutboxError):
    """The rows could not be kept; none of them was deleted."""


@dataclass(frozen=True)
class Archived:
    """A file of one day's rows."""

    path: Path
    rows: int
    """In it, those of an earlier purge included."""

    sha256: str
    key: tuple[str, ...]

    def key_chunks(self) -> Iterator[Sequence[Key]]:
        """The keys of the rows in the file, in chunks."""
        for columns in _read(self.path, self.key):
            yield list(zip(*columns, strict=True))


def archive(
    engine: Engine, aged: Aged, folder: Path, day: date, *, since: datetime | None, before: datetime
) -> Archived | None:
    """Keep the rows of a span of time in the day's file.

    Args:
        engine: the database.
        aged: which rows.
        folder: where the files of these rows are; made, for its owner alone, when it is missing.
        day: after which the file is named.
        since: the span's begin, which belongs to it; from the oldest on when not given.
        before: its end, which does not belong to it.

    Returns:
        The file; none when there are no rows.

    Raises:
        ArchiveFailed: naming the file, what is wrong and the remedy.
    """
    _require_pyarrow()
    path = folder / f"{day.isoformat()}.parquet"
    try:
        return _archive(engine, aged, path, since, before)
    except OSError as error:
        raise ArchiveFailed(
            f"{path} cannot be written ({error.strerror or error}): no row was deleted; make room, or set "
            "OUTBOX_ARCHIVE_DIR to another folder"
        ) from error


def _archive(engine: Engine, aged: Aged, path: Path, since: datetime | None, before: datetime) -> Archived | None:
    import pyarrow
    from pyarrow import parquet

    names = tuple(name for name, _type in aged.key)
    known = {key for columns in _read(path, names) for key in zip(*columns, strict=True)} if path.exists() else set()
    schema, rows = _rows(engine, aged, since, before)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".")
    os.close(handle)
    try:
        written = _Fingerprint()
        with parquet.ParquetWriter(draft, schema, compression="zstd", write_page_checksum=True) as writer:
            if known:
                old = parquet.ParquetFile(path)
                for number in range(old.num_row_groups):
                    # An older version's file may lack a column.
                    parts = [schema.empty_table(), old.read_row_group(number)]
                    table = pyarrow.concat_tables(parts, promote_options="default").select(schema.names)
                    writer.write_table(table)
                    written.add(table)
            fresh = 0
            for chunk in rows:
                new = [row for row in chunk if tuple(row._mapping[name] for name in names) not in known]
                if new:
                    table = pyarrow.Table.from_pylist([dict(row._mapping) for row in new], schema)
                    writer.write_table(table)
                    written.add(table)
                    fresh += len(new)
        if not fresh:
            return _described(path, len(known), names) if known else None
        found = _Fingerprint()
        for table in _tables(Path(draft), None):
            found.add(table)
        if not found.agrees(written):
            raise ArchiveFailed(f"{path}: what was read back is not what was written; no row was deleted")
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync_folder(path.parent)
        return _described(path, written.rows, names)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)


class _Fingerprint:
    """Of rows in their order, with all their columns."""

    def __init__(self) -> None:
        self.rows = 0
        self._digest = hashlib.sha256()

    def add(self, table: "pyarrow.Table") -> None:
        self.rows += table.num_rows
        for row in table.to_pylist():
            self._digest.update(repr(row).encode())

    def agrees(self, other: "_Fingerprint") -> bool:
        return (self.rows, self._digest.digest()) == (other.rows, other._digest.digest())


def _described(path: Path, rows: int, names: tuple[str, ...]) -> Archived:
    with path.open("rb") as file:
        return Archived(path, rows, hashlib.file_digest(file, "sha256").hexdigest(), names)


def _tables(path: Path, columns: Sequence[str] | None) -> "Iterator[pyarrow.Table]":
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path, page_checksum_verification=True)
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, columns=columns)
    except ArrowException as error:
        raise ArchiveFailed(
            f"{path} is not an archive that can be read ({error}): no row was deleted; move the file away"
        ) from error


def _read(path: Path, columns: Sequence[str]) -> Iterator[list[list[Any]]]:
    for table in _tables(path, columns):
        yield [table.column(name).to_pylist() for name in columns]


def _rows(
    engine: Engine, aged: Aged, since: datetime | None, before: datetime
) -> "tuple[pyarrow.Schema, Iterable[Sequence[Any]]]":
    import pyarrow

    with engine.connect() as connection:
        described = connection.exec_driver_sql(
            """
                SELECT attname, format_type(atttypid, NULL) AS type FROM pg_attribute
                WHERE attrelid = %(table)s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
            """,
            {"table": aged.table.replace("%%", "%")},
        ).all()
    kinds = {
        "bigint": pyarrow.int64(),
        "integer": pyarrow.int32(),
        "smallint": pyarrow.int16(),
        "double precision": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
        "timestamp with time zone": pyarrow.timestamp("us", tz="UTC"),
        "bigint[]": pyarrow.list_(pyarrow.int64()),
    }
    schema = pyarrow.schema([(name, kinds.get(kind, pyarrow.string())) for name, kind in described])
    wanted = ", ".join(name if kind in kinds else f"{name}::text" for name, kind in described)
    begin = f"{aged.at} >= %(since)s AND " if since is not None else ""

    def chunks() -> Iterator[Sequence[Any]]:
        with engine.connect().execution_options(stream_results=True) as connection:
            yield from connection.exec_driver_sql(
                f"SELECT {wanted} FROM {aged.table} WHERE {begin}{aged.at} < %(before)s AND {aged.condition}",
                {"since": since, "before": before},
            ).partitions(_ROWS_AT_ONCE)

    return schema, chunks()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ArchiveFailed(
            "OUTBOX_ARCHIVE_DIR is set, and pyarrow, which writes the files, is not installed: "
            "pip install 'outbox-pipelines[archive]'; no row was deleted"
        ) from None
