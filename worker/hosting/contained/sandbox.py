"""Bubblewrap's command line: what a contained process sees and may do, and a trial that it works here.

Contained means: no network but a loopback of its own, unless its ``View`` says so; no process but its own
descendants; no file but the system's programs and libraries, this Python and our packages, read-only, and
what its ``View`` names. It has a bounded /tmp and /dev/shm of its own, no capability, no new privilege and no
further user namespace. Everything else of the file tree, home directories and keys included, is not there.

Run by root, the process keeps user id 0, without capabilities. Files of /proc and /sys that belong to
root would still be writable by it (a core dump's handler is one, and runs outside), so both are
read-only.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError
from protos.child_process import PACKAGES_ROOT
from protos.text_limits import clean
from worker.hosting import TUNED
from worker.hosting.contained.environment import compute_environment, foreign_torch

BUBBLEWRAP = "bwrap"
PACKAGES = ("atoll", "compressors", "hostos", "protos", "strategies", "worker")
TEMPORARY_BYTES = 1 << 30  # of /tmp, and of /dev/shm
# Of the system; what is not there is left out. Libraries of drivers lie in /usr, or where a container's
# runtime puts them. From /sys: cores, caches and quotas, by which kernels and threads are chosen.
_SYSTEM_TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # folders, or links into /usr
_SYSTEM = (
    "/usr", "/nix/store", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
    "/etc/localtime", "/etc/timezone", "/sys/devices/system/cpu", "/sys/devices/system/node",
    "/sys/fs/cgroup",
)  # fmt: skip
_GPU_SYSTEM = (
    "/opt/rocm",
    "/run/nvidia",
    "/sys/bus",
    "/sys/class",
    "/sys/dev",
    "/sys/devices",
    "/sys/module",
)
_PREFIX_PARTS = ("bin", "lib", "lib32", "lib64", "pyvenv.cfg")
DEVICES = Path("/dev")
_GPU_NODES = ("nvidia*", "dri", "kfd", "dxg")
_NO_NETWORK = "--unshare-net"
_ALWAYS = (
    "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session",
    "--cap-drop", "ALL",
)  # fmt: skip


_NAMESPACES = (
    "allow them to bubblewrap: by an AppArmor profile for bwrap on Ubuntu, on older Debian by "
    "`sysctl kernel.unprivileged_userns_clone=1`; in a container see docs/tutorials/volunteer.md"
)
_CONTAINER = "the process split and the memory bound remain; see docs/tutorials/volunteer.md"


@dataclass(frozen=True, slots=True)
class View:
    """Files and devices that a contained process has beside the system's; absolute paths."""

    read_only: tuple[Path, ...] = ()
    read_write: tuple[Path, ...] = ()
    device: str = "cpu"  # cpu | cuda
    network: bool = False  # the machine's: of a site of several hosts, whose processes reach each other by it

    def __post_init__(self) -> None:
        for path in (*self.read_only, *self.read_write):
            if not path.is_absolute() or path == Path("/"):
                raise ValueError(f"a view of {path}; give absolute paths below /")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"a view with device {self.device!r}; cpu or cuda")


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What bubblewrap can do here."""

    program: str  # absolute path; "" without a sandbox
    options: tuple[str, ...] = ()
    sized: bool = False  # temporary folders can be bounded
    why_not: str = ""
    remedy: str = ""  # of that

    def __bool__(self) -> bool:
        return not self.why_not

    def wrapped(self, command: Sequence[str], view: View) -> list[str]:
        """Return the command line that runs ``command`` contained; its working folder is /tmp."""
        size = ["--size", str(TEMPORARY_BYTES)] if self.sized else []
        network = () if view.network else (_NO_NETWORK,)
        line = [self.program, *network, *_ALWAYS, *self.options, "--proc", "/proc", "--dev", "/dev"]
        line += [*size, "--tmpfs", "/dev/shm", *size, "--tmpfs", "/tmp"]  # noqa: S108 - of its own
        line += _system()
        if view.device == "cuda":
            line += _devices()
        line += _binds(view)
        # Mount points and their parents were made before this.
        for folder in ("/proc", "/dev", "/"):
            line += ["--remount-ro", folder]
        line += ["--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp", "--chdir", "/tmp"]  # noqa: S108
        return [*line, "--", *command]


# Newer ones first. User namespaces are what an ordinary user needs; root can do without them.
_WAYS = (
    (("--unshare-user", "--disable-userns"), True),
    (("--unshare-user",), False),
    ((), False),
)


@functools.cache
def probe(device: str = "cpu") -> Sandbox:
    """Return the strongest sandbox that a Python starts in here, finds torch in and, for "cuda", the GPUs
    that it finds outside; ``why_not`` says why there is none.

    Takes some 100 ms at the first call for a device, nothing later.
    """
    if not sys.platform.startswith("linux"):
        return Sandbox("", why_not="bubblewrap runs on Linux only", remedy=_CONTAINER)
    program = shutil.which(BUBBLEWRAP)
    if program is None:
        remedy = "install it: `apt install bubblewrap` on Debian and Ubuntu"
        return Sandbox("", why_not="bubblewrap is not installed", remedy=remedy)
    if device != "cpu":
        found = probe()
        return found and _with_gpu(found, View(device=device))
    errors = []
    for options, sized in _WAYS:
        found = Sandbox(program, options, sized)
        said, error = _run(found.wrapped([sys.executable, "-P", "-c", _TRIAL], View()))
        if said == "found":
            return found
        errors.append(error or f"torch or worker not found: {said}")
    why_not, remedy = _reason(errors)
    return Sandbox("", why_not=why_not, remedy=remedy)


def chosen(mode: str, device: str = "cpu") -> Sandbox:
    """Return the sandbox of `--sandbox` ``mode``. UsageError when one is required and there is none."""
    if mode == "off":
        return Sandbox("", why_not="switched off by --sandbox off", remedy="give --sandbox auto")
    found = probe(device)
    if mode == "require" and not found:
        raise UsageError(f"--sandbox require, but {found.why_not}; {found.remedy}, or give --sandbox auto")
    return found


# Looks for torch and does not import it.
_TRIAL = """
from importlib.util import find_spec
print("found" if find_spec("torch") and find_spec("worker") else "not found")
"""
_GPUS = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count)), count.value)
"""


def _with_gpu(found: Sandbox, view: View) -> Sandbox:
    """Return ``found`` if CUDA's driver says the same inside as outside: also that there is none."""
    command = [sys.executable, "-I", "-S", "-c", _GPUS]
    outside, (inside, error) = _run(command)[0], _run(found.wrapped(command, view))
    if inside == outside:
        return found
    said = clean(error or inside, 200)
    return Sandbox("", why_not=f"the GPU's driver does not work in it ({said})", remedy=_CONTAINER)


def _run(command: list[str]) -> tuple[str, str]:
    """Run a command as a compute process would be run; return what it printed, or "" and an error."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=compute_environment(),
            timeout=TUNED.sandbox_probe_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", clean(str(error), 200)
    if done.returncode == 0:
        return done.stdout.decode(errors="replace").strip(), ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return "", clean(lines[-1] if lines else f"exit code {done.returncode}", 200)


def _reason(errors: Sequence[str]) -> tuple[str, str]:
    """Put into words why no way worked, and what to do; errors about options that are not known yet say
    nothing."""
    error = next((error for error in errors if "Unknown option" not in error), errors[0])
    if any(text in error for text in ("namespace", "uid map", "RTM_NEWADDR", "clone", "unshare")):
        return f"user namespaces are not allowed here ({error})", _NAMESPACES
    if "proc" in error:
        return f"parts of /proc are hidden here, so that none can be mounted ({error})", _CONTAINER
    return f"bubblewrap does not work here ({error})", _CONTAINER


def _system() -> list[str]:
    line = []
    for name in _SYSTEM_TOP:
        path = Path(name)
        if path.is_symlink():
            line += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            line += ["--ro-bind", name, name]
    for name in _SYSTEM:
        if Path(name).exists():
            line += ["--ro-bind", name, name]
    for path in python_paths():
        line += ["--ro-bind", str(path), str(path)]
    return line


def python_paths() -> list[Path]:
    """Return what this Python, torch and our packages are read from, as far as it is not in /usr.

    Of a Python's prefix only what it needs: it may be somebody's home, or hold a worker's state.
    """
    prefixes = [sys.base_prefix, sys.prefix]
    prefixes += [os.path.realpath(prefix) for prefix in prefixes]
    wanted = [f"{prefix}/{part}" for prefix in prefixes for part in _PREFIX_PARTS]
    wanted += [sys.executable, os.path.realpath(sys.executable)]
    wanted += filter(None, [foreign_torch()])
    wanted += [str(PACKAGES_ROOT / name) for name in PACKAGES]
    kept = [Path("/usr"), Path("/nix/store")]
    for path in map(Path, wanted):
        if path.exists() and not any(map(path.is_relative_to, kept)):
            kept.append(path)
    return kept[2:]


def _devices() -> list[str]:
    """Nodes of every GPU, and what drivers are found by; the lent one is chosen by CUDA_VISIBLE_DEVICES."""
    nodes = sorted(path for pattern in _GPU_NODES for path in DEVICES.glob(pattern))
    line = [part for path in nodes for part in ("--dev-bind", str(path), str(path))]
    return line + [part for name in _GPU_SYSTEM if Path(name).exists() for part in ("--ro-bind", name, name)]


def _binds(view: View) -> list[str]:
    """What the view names, outer folders first, so that one inside another is not covered by it."""
    binds = [(path, "--ro-bind") for path in view.read_only] + [(path, "--bind") for path in view.read_write]
    return [part for path, kind in sorted(binds, key=_depth) for part in (kind, str(path), str(path))]


def _depth(bind: tuple[Path, str]) -> tuple[int, str]:
    return len(bind[0].parts), bind[1]
