"""What a policy has learned, on disk: whole at every moment, and at most one period old."""

from __future__ import annotations

import atexit
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

VERSION = 1
Snapshot = Callable[[], Mapping[str, Any]]


class StateFile:
    """A JSON file with a policy's snapshot.

    ``maybe_save`` takes the snapshot in the calling thread, which must be cheap, and leaves the rest, the encoding and
    two disk flushes, to a thread of its own: the decode loop never waits for a disk.

    Args:
        path: the file; its folder must exist.
        period_s: seconds between two saves, by the caller's clock.
        identity: what the state depends on (model, hardware); a file with another identity is not loaded.

    Raises:
        OSError: the folder cannot be written to; in one line.
    """

    def __init__(self, path: str | os.PathLike[str], period_s: float, identity: Mapping[str, str]) -> None:
        self.path = Path(path)
        self._period_s = period_s
        self._identity = dict(identity)
        #: How often it was written so far. For metrics.
        self.saves = 0
        self._saved_s: float | None = None
        self._last: Snapshot | None = None
        self._failed = False
        self._lock = threading.Lock()  # one writer at a time
        self._writer: threading.Thread | None = None
        self._refuse_unwritable()

    def load(self, restore: Callable[[Mapping[str, Any]], None]) -> bool:
        """Give what the file holds to ``restore``; whether that worked.

        A file that is damaged, of another version or identity, or that ``restore`` refuses with ``ValueError`` is kept
        aside as ``FILE.bad``, with one warning. No file: ``False``, silently.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return False
        except OSError as error:
            return self._start_afresh(f"it cannot be read: {error.strerror}")
        try:
            restore(self._decode(content))
        except ValueError as error:
            return self._start_afresh(" ".join(str(error).split()))
        return True

    def maybe_save(self, now_s: float, snapshot: Snapshot) -> None:
        """Save if a period has passed since the last save, or since the first call. Never raises for a full disk.

        Args:
            now_s: any clock that does not go backwards, in seconds.
            snapshot: makes a copy of what is to be saved; also called by :meth:`close`.
        """
        if self._last is None:
            self._last = snapshot
            atexit.register(self.close)
        if self._saved_s is None:
            self._saved_s = now_s
        elif now_s - self._saved_s >= self._period_s:
            self._save(now_s, snapshot)

    def save_early(self, now_s: float) -> None:
        """Save now what :meth:`maybe_save` was given, if anything, since nothing more is learned for a while."""
        if self._last is not None:
            self._save(now_s, self._last)

    def close(self) -> None:
        """Save for the last time, in the calling thread. Called at exit too; a second call does nothing."""
        snapshot, self._last = self._last, None
        if snapshot is not None:
            atexit.unregister(self.close)
            if self._writer is not None:
                self._writer.join()
            self._write(dict(snapshot()))

    def holder(self) -> str | None:
        """The policy whose state the file holds; ``None``: there is no file, ``""``: it does not say."""
        try:
            name = self._decode(self.path.read_bytes()).get("policy", "")
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return ""
        return name if isinstance(name, str) else ""

    # ---------------------------------------------------------------- inside

    def _save(self, now_s: float, snapshot: Snapshot) -> None:
        """Unless a save is under way."""
        if self._writer is None or not self._writer.is_alive():
            self._saved_s = now_s
            # Not a daemon: at exit Python waits for it instead of cutting it off.
            self._writer = threading.Thread(target=self._write, args=(dict(snapshot()),), name="feather-state")
            self._writer.start()

    def _write(self, data: Mapping[str, Any]) -> None:
        record = {"version": VERSION, "identity": self._identity, "state": data}
        temporary = None
        try:
            with self._lock:
                handle, temporary = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent)
                with os.fdopen(handle, "w") as file:
                    json.dump(record, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
                self._sync_folder()
        except (OSError, TypeError, ValueError) as error:  # a full disk, or a snapshot that JSON cannot hold
            with suppress(OSError):
                if temporary is not None:
                    os.unlink(temporary)
            if not self._failed:
                logger.error("%s: what was learned cannot be saved: %s; serving goes on.", self.path, error)
            self._failed = True
        else:
            self.saves += 1
            self._failed = False

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _decode(self, content: bytes) -> Mapping[str, Any]:
        try:
            record = json.loads(content)
            version, identity, state = record["version"], record["identity"], record["state"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__})") from error
        if version != VERSION:
            raise ValueError(f"it has version {version}, not {VERSION}")
        if identity != self._identity:
            raise ValueError(f"it was learned with {identity}, not with {self._identity}")
        if not isinstance(state, dict):
            raise ValueError("it is damaged (no state)")
        return state

    def _start_afresh(self, why: str) -> bool:
        bad = self.path.with_name(self.path.name + ".bad")
        try:
            os.replace(self.path, bad)
            kept = f"kept aside as {bad}"
        except OSError as error:
            kept = f"left where it is ({error.strerror})"
        logger.warning("%s: not used, %s; %s, and learning starts afresh.", self.path, why, kept)
        return False

    def _refuse_unwritable(self) -> None:
        """Write and remove a file where the state is to go, and clear away what killed processes left there."""
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path}: is a folder, and the state needs a file")
        for left in self.path.parent.glob(f".{self.path.name}.*.tmp"):
            with suppress(OSError):
                left.unlink()
        try:
            with tempfile.TemporaryFile(dir=self.path.parent):
                pass
        except OSError as error:
            raise type(error)(f"{self.path}: the state cannot be saved there: {error.strerror}") from error
