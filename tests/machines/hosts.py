# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: network namespaces with an address, a hostname and a folder each, on one bridge.

    with Hosts(4, folder) as hosts:
        process = hosts[0].start(["python", "-m", "megatron.tools.launch", ...])
        hosts[2].link("netem delay 20ms loss 1%")
        hosts[3].unplug()

Needs root, and `ip` and `tc` of Debian's iproute2; `lacking()` says what is missing. A process of a host sees its own
interfaces only, reaches the others by address or by name (host0, host1, ...), and finds them in its own /etc/hosts. All
hosts share the file system: `folder` is the shared one, `folder/hostN` the host's own. Each command has process numbers
of its own, as in a container. Clocks, memory and devices are those of the machine, and nothing limits the speed of a link
unless `link` does.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Optional

_NUMBERS = itertools.count()


@cache
def lacking() -> str:
    """What this machine lacks for hosts, in words; "" if nothing."""
    if missing := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"no {' and no '.join(missing)}: apt-get install iproute2"
    if os.geteuid():
        return "network namespaces need root"
    try:
        with Hosts(2, None):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@cache
def has_qdisc(words: str) -> bool:
    """Whether the kernel knows a discipline of `tc qdisc`: netem is a module that not all have."""
    with Hosts(1, None) as [host]:
        try:
            host.link(words)
        except subprocess.CalledProcessError:
            return False
    return True


def call(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class Host:
    """A host: its number, hostname and address; `started`: its processes."""

    def __init__(self, hosts: "Hosts", number: int):
        self.hosts, self.number, self.name = hosts, number, f"host{number}"
        self.address = f"10.79.0.{number + 1}"
        self.namespace, self.port = f"{hosts.prefix}-{number}", f"{hosts.prefix}p{number}"
        self.folder: Optional[Path] = hosts.folder and hosts.folder / self.name
        self.started: list[subprocess.Popen] = []

    def plug(self, address: Optional[str] = None) -> None:
        """Give it an interface on the bridge. address: another one than before"""
        self.address = address or self.address
        inside = f"{self.port}i"
        call("ip", "-n", self.hosts.switch, "link", "add", self.port, "type", "veth", "peer", "name", inside)
        call("ip", "-n", self.hosts.switch, "link", "set", inside, "netns", self.namespace)
        call("ip", "-n", self.hosts.switch, "link", "set", self.port, "master", "bridge", "up")
        call("ip", "-n", self.namespace, "link", "set", inside, "name", "eth0")
        call("ip", "-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        call("ip", "-n", self.namespace, "link", "set", "eth0", "up")
        call("ip", "-n", self.namespace, "link", "set", "lo", "up")
        self.hosts.write_names()

    def unplug(self) -> None:
        """Take its cable away: nothing is refused, and nothing arrives."""
        call("ip", "-n", self.hosts.switch, "link", "set", self.port, "down")

    def plug_back(self) -> None:
        call("ip", "-n", self.hosts.switch, "link", "set", self.port, "up")

    def link(self, words: str) -> None:
        """What happens to the packets that it sends and receives, in the words of `tc qdisc`; "": nothing."""
        for place, device in ((self.hosts.switch, self.port), (self.namespace, "eth0")):
            with contextlib.suppress(subprocess.CalledProcessError):  # there is none yet
                call("tc", "-n", place, "qdisc", "del", "dev", device, "root")
            if words:
                call("tc", "-n", place, "qdisc", "add", "dev", device, "root", *words.split())

    def start(self, command: Sequence[str], log: str = "log", **environment: str) -> subprocess.Popen:
        """Start a command on the host, in its folder; standard output and error go to a file there."""
        inside = [
            "unshare",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            f'hostname {self.name} && exec "$@"',
            "sh",
            *command,
        ]
        env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | environment
        with open(self.folder / log, "ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inside],
                cwd=self.folder, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def log(self, name: str = "log") -> str:
        return (self.folder / name).read_text(errors="replace")

    def pids(self) -> list[int]:
        return list(map(int, call("ip", "netns", "pids", self.namespace).split()))

    def power_off(self) -> None:
        """Its processes end at once, and nothing that they had sent is acknowledged."""
        self.unplug()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait()

    def power_on(self, address: Optional[str] = None) -> None:
        """After `power_off`. address: another one than before"""
        call("ip", "-n", self.hosts.switch, "link", "del", self.port)
        self.plug(address)


class Hosts:
    """So many hosts on a bridge, which their context manager makes and removes. folder: shared by all"""

    def __init__(self, count: int, folder: Optional[Path]):
        self.prefix = f"mh{os.getpid()}x{next(_NUMBERS)}"[-10:]
        self.folder, self.switch = folder, f"{self.prefix}-s"
        self.hosts = [Host(self, number) for number in range(count)]

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def __enter__(self) -> "Hosts":
        try:
            call("ip", "netns", "add", self.switch)
            call("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
            call("ip", "-n", self.switch, "link", "set", "bridge", "up")
            for host in self:
                call("ip", "netns", "add", host.namespace)
                Path("/etc/netns", host.namespace).mkdir(parents=True)
                host.plug()
                if host.folder:
                    host.folder.mkdir(parents=True, exist_ok=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        for host in self:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.power_off()
            shutil.rmtree(Path("/etc/netns", host.namespace), ignore_errors=True)
        for namespace in (*(host.namespace for host in self), self.switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)

    def write_names(self) -> None:
        """/etc/hosts of each host, which `ip netns exec` puts in its place."""
        names = "".join(f"{host.address} {host.name}\n" for host in self)
        for host in self:
            if (place := Path("/etc/netns", host.namespace)).exists():
                (place / "hosts").write_text(f"127.0.0.1 localhost\n{names}")


def ended(processes: Sequence[subprocess.Popen], seconds: float) -> list[Optional[int]]:
    """The exit codes, once all have ended; None for each that has not after so many seconds."""
    until = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    return [process.poll() for process in processes]
