"""Whether the other ranks still live: a device that waits for a dead one waits for ever, and its host with it.

The ranks tell each other their process once. Those of the same host are looked up in /proc while a call runs; of other
hosts torch's own timeouts know.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

LOOK_SECONDS = 1.0
GRACE_SECONDS = 10
"""From the death of a rank to the end of this process, where nothing else has ended it."""
POLL_SECONDS = 50e-6


class RankDied(RuntimeError):
    """A rank of the model has ended, so that no other can go on."""

    def __init__(self, rank: int, process: int):
        super().__init__(
            f"rank {rank} (process {process}) has ended during generate(): its part of the model is gone, "
            "and this rank cannot go on. What ended it is in its own output."
        )


class Peers:
    """The processes of all ranks.

    Args:
        processes: what `own` returned on every rank, in their order.
    """

    def __init__(self, processes: Sequence[Sequence[int]]):
        host, process, _ = self.own()
        self.on_one_host = len({other for other, _, _ in processes}) == 1
        self._others = [
            (rank, number, start)
            for rank, (other, number, start) in enumerate(processes)
            if other == host and number != process
        ]
        self._dead: RankDied | None = None

    @staticmethod
    def own() -> list[int]:
        """Return numbers for this host, this process, and when it was started."""
        return [zlib.crc32(socket.gethostname().encode()), os.getpid(), _started(os.getpid()) or 0]

    def check(self) -> None:
        """Raise if a rank was found dead.

        Raises:
            RankDied: if so.
        """
        if self._dead is not None:
            raise self._dead

    def look(self) -> bool:
        """Look for dead ranks and return whether there is one."""
        for rank, process, start in self._others:
            if self._dead is None and _started(process) != start:
                self._dead = RankDied(rank, process)
        return self._dead is not None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look every second for as long as a call runs.

        Once a rank has died, `check` raises, and whatever a library raises for that reason is raised as `RankDied`. A
        host that waits for its device inside torch or the driver cannot be told: its process is ended after
        `GRACE_SECONDS`, with the reason on its standard error.

        Raises:
            RankDied: where the block raises because a rank has died.
        """
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        except RankDied:
            raise
        except RuntimeError as error:
            if not self.look():
                time.sleep(LOOK_SECONDS)  # its connection is gone before the process is
            if self.look():
                assert self._dead is not None
                raise self._dead from error
            raise
        finally:
            done.set()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(LOOK_SECONDS) and not self.look():
            pass
        if self._dead is None or not torch.cuda.is_initialized():
            return
        # The end of the process may wait for the device too, with no Python left that could end it.
        signal.alarm(2 * GRACE_SECONDS)
        time.sleep(GRACE_SECONDS)
        print(f"{self._dead}", file=sys.stderr, flush=True)
        os._exit(1)

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event on the device for as long as all ranks live.

        Raises:
            RankDied: if one does not.
        """
        while not event.query():
            self.check()
            time.sleep(POLL_SECONDS)


def _started(process: int) -> int | None:
    """Return when a process was started, in ticks; None if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
