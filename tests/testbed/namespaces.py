"""A small cluster on one machine: network namespaces as hosts, joined by links of a set rate.

Hosts hang on two leaf switches (bridges in a namespace of their own), which one uplink joins. `tc` shapes both
ends of every link with a token bucket, so that a rate holds in each direction. Everything is named
`echo-<process>-...`, nothing outside these namespaces changes, and leaving the `with` block takes all of it away.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

PREFIX = "echo-"
HOSTS = 8
HOSTS_PER_LEAF = 4
SUBNET = "10.77.0"
# What the kernel hands over at once, in seconds of the link's rate, and at most in bytes. A token bucket has to
# hold one such segment, and lets it pass without delay, so it is small beside a message. Smaller ones cost more
# processor time.
SEGMENT_S = 1e-3
LARGEST_SEGMENT = 64 << 10
HEADERS = 1.1
QUEUE = 4 << 20
UNSHAPED = 40_000_000_000
# Present in every kernel, and steady: BBR, say, all but stops for 0.2 s every ten seconds to measure its path.
CONGESTION_CONTROL = "reno"


def why_not() -> str:
    """Why no bed can be built here; empty where one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (iproute2)"
    if importlib.util.find_spec("torch") is None:
        return "there is no torch, whose gloo the ranks run"
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError as error:
        return f"ranks need a real-time priority ({error.strerror})"
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", "eth0", "type", "veth", "peer", "name", "port")
        _ip("-n", probe, "link", "add", "leaf", "type", "bridge")
        _in(probe, "tc", *_bucket("add", "eth0", 1_000_000_000))
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return ""


class Bed:
    """Eight hosts, two leaves, one uplink; a context manager.

    Attributes:
        folder: a folder of the bed's own, for files that its processes share.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self._name = f"{PREFIX}{os.getpid()}"
        self._switch = f"{self._name}-switch"

    def __enter__(self) -> Bed:
        _remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{SUBNET}.{host + 1}"

    def command(self, host: int, *arguments: str) -> list[str]:
        """A command line that runs in a host."""
        return ["ip", "netns", "exec", self._host(host), *arguments]

    def shape(self, nic_bits_per_s: float, uplink_bits_per_s: float | None = None) -> None:
        """Sets the rate of every NIC and, where given, of the uplink; each direction has it."""
        for host in range(HOSTS):
            _ip("-n", self._host(host), "link", "set", "eth0", "gso_max_size", str(_segment(nic_bits_per_s)))
            _in(self._host(host), "tc", *_bucket("replace", "eth0", nic_bits_per_s))
            _in(self._switch, "tc", *_bucket("replace", f"port{host}", nic_bits_per_s))
        for end in ("up0", "up1"):
            _in(self._switch, "tc", *_bucket("replace", end, uplink_bits_per_s or UNSHAPED))

    def _host(self, host: int) -> str:
        return f"{self._name}-{host}"

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        inside = ("-n", self._switch)
        _ip(*inside, "link", "add", "up0", "type", "veth", "peer", "name", "up1")
        for leaf in range(HOSTS // HOSTS_PER_LEAF):
            _ip(*inside, "link", "add", f"leaf{leaf}", "type", "bridge")
            _ip(*inside, "link", "set", f"leaf{leaf}", "up")
            _ip(*inside, "link", "set", f"up{leaf}", "master", f"leaf{leaf}", "up")
        for host in range(HOSTS):
            self._join(host)

    def _join(self, host: int) -> None:
        name, port = self._host(host), f"port{host}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._switch)
        _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        _in(name, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")
        # A flow keeps its rate from one step to the next, as a network card's would.
        _in(name, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
        leaf = f"leaf{host // HOSTS_PER_LEAF}"
        _ip("-n", self._switch, "link", "set", port, "master", leaf, "up")

    def _remove(self) -> None:
        _delete(f"{self._name}-")
        shutil.rmtree(self.folder, ignore_errors=True)


def _segment(bits_per_s: float) -> int:
    return min(LARGEST_SEGMENT, round(bits_per_s / 8 * SEGMENT_S))


def _bucket(verb: str, device: str, bits_per_s: float) -> list[str]:
    rate, burst = f"{round(bits_per_s)}bit", str(round(_segment(bits_per_s) * HEADERS))
    return ["qdisc", verb, "dev", device, "root", "tbf", "rate", rate, "burst", burst, "limit", str(QUEUE)]


def _remove_abandoned() -> None:
    """Takes away the namespaces of processes that are no more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for owner in {
        line.removeprefix(PREFIX).split("-")[0] for line in listed.splitlines() if line.startswith(PREFIX)
    }:
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _delete(f"{PREFIX}{owner}-")


def _delete(beginning: str) -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name in [line.split()[0] for line in listed.splitlines() if line.startswith(beginning)]:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _in(namespace: str, *command: str) -> None:
    _ip("netns", "exec", namespace, *command)
