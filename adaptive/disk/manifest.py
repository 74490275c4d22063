"""The manifest of a checkpoint's folder: a list of its files with sizes and checksums, which `verify` checks.

The manifest is written last. A folder without one is unfinished; one whose files differ from it is damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path

MANIFEST = "manifest.json"
_BLOCK = 1 << 20


class DamagedError(Exception):
    """A folder doesn't match its manifest; the message names the difference."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder, and flush all of its files to the disk."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: [(folder / name).stat().st_size, _checksum(folder / name, leave=True)] for name in names}
    body = json.dumps(files, indent=0).encode()
    write_through(folder / MANIFEST, b"%08x\n%s" % (zlib.crc32(body), body))
    sync_folder(folder)


def verify(folder: Path) -> str:
    """Read all files of a folder, and compare them with its manifest.

    Returns:
      A digest of the manifest: equal for equal folders.

    Raises:
      DamagedError: a file differs, is missing or cannot be read.
    """
    text = _read_manifest(folder)
    files: dict[str, list[int]] = json.loads(text.partition(b"\n")[2])
    for name, (size, checksum) in files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                raise DamagedError(f"{name} has {found} bytes; {size} were written")
            if _checksum(path) != checksum:
                raise DamagedError(f"{name} was changed after it was written")
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except OSError as error:
            raise DamagedError(f"{name} cannot be read: {error.strerror or error}") from error
    return hashlib.sha256(text).hexdigest()


def _read_manifest(folder: Path) -> bytes:
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST}, which is written last, is missing") from None
    except OSError as error:
        raise DamagedError(f"{MANIFEST} cannot be read: {error.strerror or error}") from error
    checksum, _, body = text.partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(body):
        raise DamagedError(f"{MANIFEST} was changed after it was written")
    return text


def _checksum(path: Path, *, leave: bool = False) -> int:
    """Return a file's CRC-32, which is several times as fast as a cryptographic digest.

    Args:
      leave: flush the file to the disk and drop it from the page cache: it is not read soon, and the next file is
        written much faster to pages that were just used.
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
    """Write a file, and flush it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of files to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
