"""Several hosts on this machine, for tests of what happens between hosts: network namespaces behind one switch.

A host has a name, an address and processes of its own network; the file system is shared. Everything lives in a process
namespace whose first process reads from a pipe of ours: when this process ends, however it ends, the kernel ends all
that runs on the hosts and takes their network away. So nothing is left, and no name is used that another could want.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import psutil
import pytest

from tests.speed import limit

_TOOLS = ("unshare", "nsenter", "ip", "bash", "mount")
_BURST, _QUEUE = "128kb", "50ms"  # of a link whose rate is limited
_NET = "10.77.0"

# The first process of all: a switch, and a process for each host that keeps its namespaces. `cat` ends with our pipe.
_SWITCH = f"""
set -e
limit() {{ [ -z "$RATE" ] || tc qdisc add dev $1 root tbf rate $RATE burst $BURST latency $QUEUE; }}
export -f limit
ip link add br0 type bridge; ip link set br0 up
for i in $(seq 1 $1); do
    export folder=$2 name=h$i
    unshare --net --uts --mount bash -c '
        hostname $name; mount --bind $folder/hosts /etc/hosts; echo ready; exec sleep infinity' > $2/ready.$i &
    until [ -s $2/ready.$i ]; do sleep 0.01; done
    ip link add v$i type veth peer name e0 netns $!
    ip link set v$i master br0 up
    limit v$i
    nsenter -t $! -n bash -ec "
        echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
        ip link set lo up; ip addr add {_NET}.$i/24 dev e0; ip link set e0 up
        limit e0"
    echo $! > $2/pid.$i
done
echo ready
exec cat
"""

# What mpirun calls where it would call ssh: `agent HOST COMMAND …`.
_AGENT = """#!/bin/bash
host=$1; shift
exec nsenter -t $(cat {folder}/pid.${{host#h}}) -n -u -m -- bash -c "$*"
"""


class Hosts:
    """Hosts h1, h2, … that see one another: so many. mpirun runs on h1."""

    def __init__(self, number: int, folder: Path, switch: subprocess.Popen):
        self.number, self._folder = number, folder
        self._init = psutil.Process(switch.pid).children()[0].pid  # of all: `unshare` has forked it

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """A command line that runs another one on a host."""
        return [*self._enter(), "nsenter", "-t", self._pid(host), "-n", "-u", "-m", "--", *arguments]

    def cut(self, host: str) -> None:
        """Take a host's link down; it hears nothing of the others, and they nothing of it."""
        subprocess.run(self.command(host, ["ip", "link", "set", "e0", "down"]), check=True, timeout=limit(10))

    def limit(self, host: str, rate: str) -> None:
        """Limit what a host sends, as `tc` reads it: "100mbit". Replaces an earlier limit."""
        shape = ["root", "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE]
        subprocess.run(
            self.command(host, ["tc", "qdisc", "replace", "dev", "e0", *shape]), check=True, timeout=limit(10)
        )

    def wait_until_gone(self, host: str, program: str, timeout: float) -> bool:
        """Whether all processes of a host that run a program have ended, within so many seconds."""
        own = self.command(host, ["readlink", "/proc/self/ns/net"])
        network = subprocess.run(own, check=True, capture_output=True, text=True, timeout=limit(10)).stdout.strip()
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if not any(program in _command_line(pid) for pid in psutil.pids() if _network(pid) == network):
                return True
            time.sleep(0.05)
        return False

    def environment(self) -> dict[str, str]:
        """What Open MPI has to know to start ranks on these hosts."""
        return {
            "PRTE_MCA_plm_ssh_agent": str(self._folder / "agent"),
            "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
            "PRTE_MCA_prte_if_include": f"{_NET}.0/24",
            "OMPI_MCA_btl_tcp_if_include": f"{_NET}.0/24",
            # Open MPI's own files are named by process ids, which are counted from 1 here.
            "TMPDIR": str(self._folder),
        }

    def _pid(self, host: str) -> str:
        return (self._folder / f"pid.{host.removeprefix('h')}").read_text().strip()

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._init), "-n", "-m", "-p", "--"]


def _network(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _command_line(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


@contextmanager
def hosts(n: int = 2, rate: str = "") -> Iterator[Hosts]:
    """Make `n` hosts; the test is skipped where that is not possible (it takes Linux and root).

    Args:
      rate: that of each host's link, in either direction, as `tc` reads it: "1gbit". By default as fast as memory.
    """
    if why := _why_not():
        pytest.skip(why)
    if rate and shutil.which("tc") is None:
        pytest.skip("a link's rate is limited by tc")
    with tempfile.TemporaryDirectory(prefix="hosts-") as name:
        folder = Path(name)
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{_NET}.{i} h{i}\n" for i in range(1, n + 1)))
        agent = folder / "agent"
        agent.write_text(_AGENT.format(folder=folder))
        agent.chmod(0o755)
        switch = _start(["bash", "-c", _SWITCH, "switch", str(n), name], rate)
        try:
            assert switch.stdout is not None
            if switch.stdout.readline() != "ready\n":
                pytest.skip(f"no network namespaces here: {switch.communicate()[1]}")
            yield Hosts(n, folder, switch)
        finally:
            _end(switch)


def _start(command: Sequence[str], rate: str) -> subprocess.Popen:
    namespaces = ["unshare", "--pid", "--net", "--mount", "--fork", "--kill-child", "--mount-proc"]
    pipe = subprocess.PIPE
    environ = {**os.environ, "RATE": rate, "BURST": _BURST, "QUEUE": _QUEUE}
    return subprocess.Popen([*namespaces, *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environ)


def _end(switch: subprocess.Popen) -> None:
    """Returns when all that ran there is gone: the kernel reaps a process namespace before its first process."""
    switch.communicate(timeout=limit(30))


@lru_cache(maxsize=1)
def _why_not() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts of one's own take Linux and root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"hosts of one's own take {', '.join(missing)}"
    return ""
