"""Network namespaces and TUN devices: the kernel's half of the lab.

Each host is a namespace whose only way out is the device ``wan0``. What the kernel sends
there, the holder of the device's descriptor reads as one packet, and the other way round.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import subprocess
from pathlib import Path

from atoll.errors import AtollError

DEVICE = "wan0"
NETNS_DIR = Path("/var/run/netns")
HEADER_BYTES = 10  # struct virtio_net_hdr in front of every packet when offload is on

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_CLONE_NEWNET = 0x40000000


class LabError(AtollError):
    """The lab cannot be built or used; says what is missing and what to do."""


def run_ip(*arguments: str, check: bool = True) -> str:
    """Run ``ip``; its standard output. LabError with its words when it fails and ``check``."""
    try:
        done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise LabError("the lab needs the command ip; install the package iproute2") from error
    if check and done.returncode:
        raise LabError(f"ip {' '.join(arguments)}: {done.stderr.strip()}; the lab's namespaces need root")
    return done.stdout


_RIGHTS = {"NET_ADMIN": 12, "SYS_ADMIN": 21}  # capabilities(7)


def unavailable() -> str | None:
    """Why namespaces cannot be used here, or None."""
    if os.geteuid() != 0:
        return "not root"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun (modprobe tun, or run the container with --device /dev/net/tun)"
    if not any(Path(folder, "ip").exists() for folder in os.get_exec_path()):
        return "no ip command (install iproute2)"
    rights = _rights()
    if lacking := [name for name, bit in _RIGHTS.items() if not rights >> bit & 1]:
        flags = " ".join(f"--cap-add {name}" for name in lacking)
        return f"no right to make namespaces (run the container with {flags})"
    return None


def _rights() -> int:
    """This process's effective capabilities as bits; all of them where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return -1
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), -1)


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise LabError(f"cannot enter a network namespace: {errno.errorcode.get(code, code)}; needs root")


class InNamespace:
    """Context: this thread is inside the network namespace ``name``. One thread only."""

    def __init__(self, name: str) -> None:
        self.path = NETNS_DIR / name
        self.own = -1

    def __enter__(self) -> None:
        self.own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            _setns(descriptor)
        finally:
            os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        _setns(self.own)
        os.close(self.own)


def open_tun() -> int:
    """Make ``wan0`` in the current namespace and return its non-blocking descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    return descriptor


def set_offload(descriptor: int, on: bool) -> None:
    """Let the kernel hand over bursts of up to 64 KiB as one packet (TCP segmentation offload).

    Off, every packet is at most one MTU: needed where single packets are lost by chance.
    """
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, (_TUN_F_CSUM | _TUN_F_TSO4) if on else 0)


def set_sysctl(name: str, value: str) -> None:
    """Write one net.* setting of the current namespace; LabError names what the kernel has."""
    path = Path("/proc/sys", *name.split("."))
    try:
        path.write_text(value, encoding="ascii")
    except OSError as error:
        raise LabError(f"the kernel refuses {name} = {value}: {error.strerror}") from error


def make_host(namespace: str, address: str, mtu: int, congestion: str) -> int:
    """Create a namespace with lo and ``wan0`` up at ``address``/16; the device's descriptor."""
    run_ip("netns", "add", namespace)
    with InNamespace(namespace):
        descriptor = open_tun()
        set_sysctl("net.ipv6.conf.all.disable_ipv6", "1")
        set_sysctl("net.ipv4.tcp_congestion_control", congestion)
        # What one connection learnt about a path must not steer the next measurement.
        set_sysctl("net.ipv4.tcp_no_metrics_save", "1")
    run_ip("-n", namespace, "addr", "add", f"{address}/16", "dev", DEVICE)
    run_ip("-n", namespace, "link", "set", DEVICE, "mtu", str(mtu), "txqueuelen", "5000", "up")
    run_ip("-n", namespace, "link", "set", "lo", "up")
    return descriptor
