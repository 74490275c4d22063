"""What tests of checkpoint directories share: a folder of files, and a checkpoint of them."""

from __future__ import annotations

from adaptive.disk.directory import commit


def fill(text):
    def write(folder):
        (folder / "deep").mkdir()
        (folder / "a.txt").write_text(text)
        (folder / "deep" / "b.bin").write_bytes(bytes(range(256)) * 9000)
        (folder / "empty").touch()

    return write


def write(directory, step, text="text"):
    return commit(directory, step, fill(text), lambda: None)
