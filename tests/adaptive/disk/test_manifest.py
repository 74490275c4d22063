"""A folder is complete, or the part that is damaged or missing is found."""

from __future__ import annotations

import os

import pytest

from adaptive.disk.manifest import DamagedError, verify
from tests.adaptive.disk.folders import fill, write


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_manifest_digest_differs_between_folders_and_is_reproducible(tmp_path):
    one, same, other = (write(tmp_path, 1, text) for text in ("text", "text", "tex_"))
    assert verify(one) == verify(same) != verify(other)


def test_a_folder_without_a_seal_was_never_finished(tmp_path):
    fill("text")(tmp_path)
    with pytest.raises(DamagedError, match=r"manifest\.json, which is written last, is missing"):
        verify(tmp_path)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_any_byte_that_has_changed_is_found(tmp_path, number, where):
    folder = write(tmp_path, 1)
    path = [path for path in files(folder) if path.stat().st_size][number % 3]
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1 << (number * 2)
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=f"{path.name} was changed after it was written"):
        verify(folder)


@pytest.mark.parametrize("number", range(4))
def test_any_file_that_is_missing_or_cut_is_found(tmp_path, number):
    folder = write(tmp_path, 1)
    path = files(folder)[number]
    if path.stat().st_size:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(DamagedError, match=path.name):
            verify(folder)
    path.unlink()
    with pytest.raises(DamagedError, match=f"{path.name}.* is missing"):
        verify(folder)


def test_a_file_that_cannot_be_read_is_damage(tmp_path):
    folder = write(tmp_path, 1)
    (folder / "a.txt").unlink()
    (folder / "a.txt").mkdir()
    with pytest.raises(DamagedError, match=r"a\.txt"):
        verify(folder)
