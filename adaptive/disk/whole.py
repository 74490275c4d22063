"""Whether a checkpoint's folder is whole: it is *sealed* by a list of its files, with their sizes and checksums.

The seal is written last. A folder without one was never finished; one whose files are not those of its seal is damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path

SEAL = "whole.json"
_BLOCK = 1 << 20


class DamagedError(Exception):
    """A folder is not what was sealed. Says what is wrong with it."""


def seal(folder: Path) -> None:
    """Say that a folder is whole as it is. All of it is on the disk when this returns."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: [(folder / name).stat().st_size, _checksum(folder / name, leave=True)] for name in names}
    body = json.dumps(files, indent=0).encode()
    write_through(folder / SEAL, b"%08x\n%s" % (zlib.crc32(body), body))
    to_disk(folder)


def check(folder: Path) -> str:
    """Read all of a folder, and compare it with its seal.

    Returns:
      A digest of the seal: equal where the folders are.

    Raises:
      DamagedError: it is not whole.
    """
    text = _seal_of(folder)
    files: dict[str, list[int]] = json.loads(text.partition(b"\n")[2])
    for name, (size, checksum) in files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                raise DamagedError(f"{name} has {found} bytes, where {size} were written")
            if _checksum(path) != checksum:
                raise DamagedError(f"{name} has other contents than were written")
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except OSError as error:
            raise DamagedError(f"{name} cannot be read: {error.strerror or error}") from error
    return hashlib.sha256(text).hexdigest()


def _seal_of(folder: Path) -> bytes:
    try:
        text = (folder / SEAL).read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{SEAL}, which is written last, is missing") from None
    except OSError as error:
        raise DamagedError(f"{SEAL} cannot be read: {error.strerror or error}") from error
    checksum, _, body = text.partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(body):
        raise DamagedError(f"{SEAL} has other contents than were written")
    return text


def _checksum(path: Path, *, leave: bool = False) -> int:
    """CRC-32: several times as fast as what would withstand somebody who means it.

    Args:
      leave: have the file on the disk, and leave the memory in which the system keeps it: nobody reads it soon, and the
        next one is written much faster to memory that was just used than to memory that was not.
    """
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
        if leave:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return value


def write_through(path: Path, content: bytes) -> None:
    """Write a file, and have it on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def to_disk(folder: Path) -> None:
    """Have a folder's list of files on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
