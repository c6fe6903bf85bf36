"""Ranks that die: found by their process, said by name, and no rank that lives is taken for dead."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hf_rewrite_runtime.tensor_parallel import liveness
from hf_rewrite_runtime.tensor_parallel.liveness import Peers, RankDied

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked up in /proc")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def peers_with(process: subprocess.Popen[bytes]) -> Peers:
    own = Peers.own()
    started = liveness._started(process.pid)
    assert started is not None
    return Peers([own, [own[0], process.pid, started]])


def test_a_rank_that_lives_is_not_dead(other: subprocess.Popen[bytes]) -> None:
    peers = peers_with(other)
    assert peers.on_one_host
    assert not peers.look()
    peers.check()


def test_a_rank_that_was_killed_is_named_before_anyone_has_waited_for_it(other: subprocess.Popen[bytes]) -> None:
    peers = peers_with(other)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still listed
    assert peers.look()
    with pytest.raises(RankDied, match=rf"rank 1 \(process {other.pid}\)"):
        peers.check()


def test_another_process_of_the_same_number_is_not_the_rank(other: subprocess.Popen[bytes]) -> None:
    own = Peers.own()
    assert Peers([own, [own[0], other.pid, 1]]).look()


def test_ranks_of_other_hosts_are_left_to_torch() -> None:
    own = Peers.own()
    peers = Peers([own, [own[0] + 1, 2**22, 1]])
    assert not peers.on_one_host
    assert not peers.look()


def test_what_a_library_raises_over_a_dead_rank_says_that_it_died(other: subprocess.Popen[bytes]) -> None:
    peers = peers_with(other)
    other.kill()
    other.wait()
    with pytest.raises(RankDied) as raised, peers.watched():
        raise RuntimeError("connection closed by peer")
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_what_is_raised_while_all_ranks_live_stays(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="of the model") as raised, peers_with(other).watched():
        raise RuntimeError("of the model")
    assert type(raised.value) is RuntimeError
