"""Copy files into a sandbox and out of it.

Paths inside are only ever resolved inside, by programs that run there as root: a link in the
sandbox that points to `/etc/shadow` means the sandbox's own. The host reads and writes archives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import stat
import tempfile
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rollout._logs import get_logger
from rollout.sandbox.errors import NamespaceError, TransferError
from rollout.sandbox.extract import extract
from rollout.sandbox.holder import PATH
from rollout.sandbox.sandbox import Sandbox
from rollout.sandbox.tasks import finish

__all__ = [
    "MAX_BYTES",
    "MAX_FILE_BYTES",
    "download_dir",
    "download_file",
    "upload_dir",
    "upload_file",
]

logger = get_logger(__name__)

MAX_BYTES = 16 * 1024**3
"""Most that one transfer out of a sandbox may write on the host."""

MAX_FILE_BYTES = 256 * 1024**2
"""The largest file of a folder that is copied out. Harbor reads logs and results as a whole, so a
sandbox could fill the memory of the host with a file that is one hole."""

TAR_CHANGED = 1
"""GNU tar's status for files that changed while they were read: no reason to refuse logs."""

# Positional parameters only: no name, however odd, becomes part of a script.
_PUT_FILE = """
set -eu
target=$1
if [ -d "$target" ]; then target=${target%/}/$2; fi
parent=${target%/*}
mkdir -p -- "${parent:-/}"
trap 'rm -f -- "$target.$4"' EXIT
set -C
cat > "$target.$4"
chmod -- "$3" "$target.$4"
mv -fT -- "$target.$4" "$target"
"""
_DROP_PART = """
target=$1
if [ -d "$target" ]; then target=${target%/}/$2; fi
rm -f -- "$target.$3"
"""
_PUT_DIR = """
set -eu
mkdir -p -- "$1"
exec tar --extract --file=- --preserve-permissions --no-same-owner --no-overwrite-dir \
    --keep-directory-symlink --directory="$1"
"""
_GET_FILE = """
set -eu
if [ -d "$1" ]; then echo "is a folder, not a file: $1" >&2; exit 1; fi
if [ ! -f "$1" ]; then echo "no such file: $1" >&2; exit 1; fi
if [ "$(stat --dereference --format=%s -- "$1")" -gt "$2" ]; then
  echo "larger than $2 bytes: $1" >&2; exit 1
fi
stat --dereference --format=%a -- "$1" >&2
# A pipe that has come in its place meanwhile does not hold this up.
exec dd if="$1" iflag=nonblock bs=1M status=none
"""
_GET_DIR = """
set -eu
if [ ! -d "$1" ]; then echo "no such folder: $1" >&2; exit 2; fi
folder=$1
shift
exec tar --create --file=- --format=posix --sparse --hard-dereference "$@" --directory="$folder" .
"""


async def upload_file(sandbox: Sandbox, source: Path, target: str) -> None:
    """Copy a file of the host into the sandbox, with its permissions.

    Args:
        sandbox: A running sandbox.
        source: The file.
        target: Where it goes. Into it, under its own name, if that is an existing folder.

    Raises:
        FileNotFoundError: If there is no such file.
        TransferError: If it cannot be written inside.
    """
    with source.open("rb") as file:
        mode = f"{stat.S_IMODE(os.fstat(file.fileno()).st_mode):o}"
        part = f"part-{uuid.uuid4().hex}"
        arguments = [target, source.name, mode, part]
        try:
            await _run_inside(sandbox, _PUT_FILE, arguments, f"upload of {target!r}", stdin=file)
        except asyncio.CancelledError:
            # It was killed, so it could not tidy up by itself.
            await finish(_drop_part(sandbox, [target, source.name, part]))
            raise


async def _drop_part(sandbox: Sandbox, arguments: list[str]) -> None:
    try:
        await _run_inside(sandbox, _DROP_PART, arguments, "removal of half an upload")
    except NamespaceError as error:
        logger.debug("half an upload goes with its sandbox: %s", error)


async def upload_dir(
    sandbox: Sandbox, source: Path, target: str, *, exclude: Sequence[str] = ()
) -> None:
    """Copy what is in a folder of the host into one of the sandbox, links as links.

    Args:
        sandbox: A running sandbox.
        source: The folder.
        target: Where its content goes; made if it does not exist.
        exclude: Names directly in the folder that are left out.

    Raises:
        FileNotFoundError: If there is no such folder.
        TransferError: If it cannot be read, or not be written inside.
    """
    _need_folder(source)
    with sandbox.open_file() as archive:
        await _pack(source, archive, exclude)
        archive.seek(0)
        await _run_inside(sandbox, _PUT_DIR, [target], f"upload of {target!r}", stdin=archive)


async def download_file(sandbox: Sandbox, source: str, target: Path) -> None:
    """Copy a file of the sandbox to the host. A link is followed inside the sandbox.

    Args:
        sandbox: A running sandbox.
        source: The file.
        target: Where it goes. Into it, under its own name, if that is an existing folder.

    Raises:
        TransferError: If there is no such file, or it is too large.
    """
    final = _place_for(source, target)
    descriptor, part = tempfile.mkstemp(prefix=".part-", dir=final.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            said = await _run_inside(
                sandbox, _GET_FILE, [source, str(MAX_BYTES)], f"download of {source!r}", stdout=file
            )
            os.fchmod(descriptor, (_mode(said) & 0o777) | 0o600)
        # Replaces a link instead of writing through it.
        os.replace(part, final)  # noqa: PTH105 - one step
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)  # noqa: PTH108 - one step
        raise


async def download_dir(
    sandbox: Sandbox,
    source: str,
    target: Path,
    logger: logging.Logger,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    exclude: Sequence[str] = (),
) -> None:
    """Copy what is in a folder of the sandbox to the host, replacing files.

    Args:
        sandbox: A running sandbox.
        source: The folder.
        target: Where its content goes; made if it does not exist.
        logger: Told of what is left out: devices, pipes, links that lead out of the folder, what
            is too large.
        max_file_bytes: The largest size of a file, holes included.
        exclude: Patterns of `tar` for what is left out.

    Raises:
        TransferError: If there is no such folder, or it holds more than `MAX_BYTES`; holes in
            files do not count.
    """
    with sandbox.open_file() as archive:
        await _run_inside(
            sandbox, _GET_DIR, [source, *(f"--exclude={each}" for each in exclude)],
            f"download of {source!r}", stdout=archive, accept=TAR_CHANGED,
        )  # fmt: skip
        archive.seek(0)
        stop = threading.Event()
        work = asyncio.ensure_future(
            asyncio.to_thread(
                extract,
                archive,
                target,
                max_bytes=MAX_BYTES,
                max_file_bytes=max_file_bytes,
                stop=stop,
            )
        )
        try:
            skipped = await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await finish(asyncio.wait([work]))
            raise
    for each in skipped:
        logger.warning("Not copied out of the sandbox: %s", each)


async def _run_inside(
    sandbox: Sandbox,
    script: str,
    arguments: list[str],
    what: str,
    *,
    stdin: IO[bytes] | None = None,
    stdout: IO[bytes] | None = None,
    accept: int = 0,
) -> str:
    if any("\0" in each for each in arguments):
        raise TransferError(f"{what}: no file has a NUL in its name")
    with sandbox.open_file() as said, sandbox.open_file() as nothing:
        code = await sandbox.run_with_files(
            ["bash", "-c", script, "transfer", *arguments],
            stdin=stdin,
            stdout=stdout or nothing,
            stderr=said,
            max_file_bytes=MAX_BYTES if stdout is not None else None,
            guarded=True,
        )
        said.seek(0)
        text = said.read(4000).decode(errors="replace").strip()
    if code not in {0, accept}:
        raise TransferError(f"{what} failed (status {code}): {text or 'no message'}")
    return text


def _need_folder(path: Path) -> None:
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder: {path}")


def _place_for(source: str, target: Path) -> Path:
    """Where a file goes that is copied to a place, which may be a folder, or not be there yet."""
    if target.is_dir():
        name = source.rstrip("/").rpartition("/")[2]
        if name in {"", ".", ".."}:
            raise TransferError(f"not the name of a file: {source!r}")
        target /= name
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _mode(said: str) -> int:
    try:
        return int(said.splitlines()[0], 8)
    except (IndexError, ValueError):
        return 0o644


async def _pack(source: Path, archive: IO[bytes], exclude: Sequence[str]) -> None:
    tar = shutil.which("tar", path=PATH)
    left_out = [f"--exclude=./{name}" for name in exclude]
    process = await finish(
        asyncio.create_subprocess_exec(
            tar or "tar", "--create", "--file=-", "--format=posix", "--anchored",
            "--no-wildcards", *left_out, f"--directory={source}", ".",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=archive,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": PATH, "LC_ALL": "C"},
            start_new_session=True,
        ),
        abandon=_end,
    )  # fmt: skip
    try:
        said = (await process.communicate())[1]
    except BaseException:
        await finish(_end(process))
        raise
    if process.returncode != 0:
        reason = said.decode(errors="replace").strip()[:4000]
        raise TransferError(f"cannot read {source}: {reason}")


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        process.kill()
    except ProcessLookupError:
        return
    await process.communicate()
