from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox_pipelines.ml_service.batch import learn_batch
from outbox_pipelines.ml_service.open_tenants import OpenTenants
from outbox_pipelines.ml_service.state import StateError, StateFolder, TenantState

from .rows import OTHER_TENANT, TENANT, answers, directly_trained, rows

HOSTILE = {
    "a way up": "../../state",
    "an absolute path": "/no-such-folder/state",
    "a dot": ".",
    "two dots": "..",
    "a slash": "a/b",
    "a NUL": "a\x00b",
    "half a character": "\ud800",
    "very long": "x" * 5000,
    "an upper-case UUID": TENANT.upper(),
    "a letter beyond ASCII": "é",
}


@pytest.fixture
def folder(state_dir: Path) -> Iterator[StateFolder]:
    with StateFolder(state_dir) as opened:
        yield opened


def learned(count: int) -> TenantState:
    state = TenantState()
    learn_batch(state, rows(count))
    return state


def test_a_state_saved_is_found_by_the_next_server(state_dir: Path) -> None:
    with StateFolder(state_dir) as first:
        first.save(TENANT, learned(40))
    with StateFolder(state_dir) as second:
        found = second.load(TENANT)
    assert found.learned.ranges() == [(1, 40)]
    assert answers(found.model) == answers(directly_trained(rows(40)))


def test_a_tenant_never_saved_is_new_and_leaves_no_file(folder: StateFolder) -> None:
    assert folder.load(TENANT).model.examples_seen == 0
    assert not folder.file_of(TENANT).exists()


@pytest.mark.parametrize("tenant", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_tenant_name_leads_out_of_the_folder(folder: StateFolder, tenant: str) -> None:
    folder.save(tenant, learned(3))
    assert folder.file_of(tenant).parent == folder.path
    assert [file.name for file in folder.path.iterdir() if file.suffix == ".state"] == [folder.file_of(tenant).name]
    assert folder.load(tenant).model.examples_seen == 3


def test_two_tenants_never_share_a_file(folder: StateFolder) -> None:
    @given(st.text(max_size=50), st.text(max_size=50))
    @example(TENANT, TENANT.upper())
    def check(one: str, other: str) -> None:
        # Also where the file system does not tell upper from lower case.
        same_file = folder.file_of(one).name.lower() == folder.file_of(other).name.lower()
        assert same_file is (one == other)

    check()


DAMAGE = {
    "emptied": lambda _: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "one digit more": lambda content: content.replace(b'"variance":', b'"variance":9', 1),
    "of another format": lambda content: content.replace(b"state-1", b"state-2"),
    "not ours": lambda _: b"\x80\x04pickle\x00",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_an_error_with_a_remedy_never_a_new_model(
    folder: StateFolder, damage: Callable[[bytes], bytes]
) -> None:
    folder.save(TENANT, learned(5))
    file = folder.file_of(TENANT)
    damaged = damage(file.read_bytes())
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    with pytest.raises(StateError, match="restore it from a backup, or move it away") as error:
        folder.load(TENANT)
    assert str(file) in str(error.value)
    assert file.read_bytes() == damaged


def test_ids_and_model_that_do_not_agree_are_not_used(folder: StateFolder) -> None:
    state = learned(5)
    state.learned.add(6)  # as if learning had stopped half-way
    folder.save(TENANT, state)
    with pytest.raises(StateError, match="do not agree"):
        folder.load(TENANT)


def test_the_file_of_one_tenant_is_not_taken_for_another_s(folder: StateFolder) -> None:
    folder.save(TENANT, learned(5))
    shutil.copy(folder.file_of(TENANT), folder.file_of(OTHER_TENANT))
    with pytest.raises(StateError, match="belongs to another tenant"):
        folder.load(OTHER_TENANT)


def test_a_state_is_on_the_disk_before_it_takes_the_name(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("sync folder" if is_folder else "sync file")
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        assert source.parent == target.parent
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    folder.save(TENANT, learned(5))
    assert steps == ["sync file", "rename", "sync folder"]
    folder.load(TENANT)
    assert steps[3:] == ["sync folder"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_state_and_no_litter(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder.save(TENANT, learned(5))
    with monkeypatch.context() as broken:
        broken.setattr(os, step, full)
        with pytest.raises(StateError, match="No space left on device; free or repair the disk") as error:
            folder.save(TENANT, learned(9))
    assert str(folder.file_of(TENANT)) in str(error.value)
    assert folder.load(TENANT).model.examples_seen == 5
    assert {file.name for file in folder.path.iterdir()} == {".lock", f"{TENANT}.state"}


def test_a_folder_has_one_server_at_a_time(folder: StateFolder) -> None:
    with pytest.raises(StateError, match="in use by another server"):
        StateFolder(folder.path)
    folder.save(TENANT, learned(1))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"cannot be used: .*name a folder") as error:
        StateFolder(tmp_path / "file" / "state")
    assert str(tmp_path / "file" / "state") in str(error.value)


def test_an_error_while_a_state_is_lent_forgets_what_was_not_saved(folder: StateFolder) -> None:
    tenants = OpenTenants(folder)
    with tenants.borrow(TENANT) as state:
        learn_batch(state, rows(5))
        folder.save(TENANT, state)
    with suppress(ZeroDivisionError), tenants.borrow(TENANT) as state:
        learn_batch(state, rows(9))
        raise ZeroDivisionError
    with tenants.borrow(TENANT) as state:
        assert state.learned.ranges() == [(1, 5)]
        assert answers(state.model) == answers(directly_trained(rows(5)))


def test_only_the_recently_used_tenants_stay_in_memory(folder: StateFolder) -> None:
    tenants = OpenTenants(folder, kept_open=2)
    names = [f"tenant {n}" for n in range(5)]
    for name in names:
        with tenants.borrow(name) as state:
            learn_batch(state, rows(5))
            folder.save(name, state)
    for name in names[0], names[4]:
        folder.file_of(name).unlink()
    seen = {}
    for name in reversed(names):
        with tenants.borrow(name) as state:
            seen[name] = state.model.examples_seen
    assert seen[names[4]] == 5  # from memory
    assert seen[names[1]] == 5  # from disk
    assert seen[names[0]] == 0  # from nowhere
