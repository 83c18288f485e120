"""What a hostile process cannot reach from inside, and what it must be able to use.

Without a sandbox the same attempts succeed, as far as this user's rights go: each such run shows that the
attempt is a real one, and that nothing but the sandbox stops it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.child_process import PACKAGES_ROOT
from tests.worker.hosting.launching import WAYS, ended, launched, sandbox_for
from worker.hosting.contained import sandbox
from worker.hosting.contained.sandbox import Sandbox, View, probe

# Each attempt prints its name and "done" or why not.
ATTEMPTS = """
import ctypes, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)

def attempt(name, act):
    try:
        act()
        print(name, "done", flush=True)
    except OSError as error:
        print(name, error.strerror, flush=True)

def call(function, *arguments):
    if getattr(libc, function)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def connect(family, address):
    with socket.socket(family) as end:
        end.settimeout(5)
        end.connect(address)

"""


def outcomes(code: str, way: str, view: View | None = None) -> dict[str, str]:
    """The outcome of each attempt of a program that ends well."""
    with launched(ATTEMPTS + code, way, view) as made:
        ending = ended(made)
    assert str(ending) == "exit code 0", ending.lines
    return dict(line.split(" ", 1) for line in ending.lines)


@pytest.mark.parametrize("way", WAYS)
def test_files_outside_the_view_are_not_there(way: str, tmp_path: Path) -> None:
    secret = tmp_path / "state" / "identity" / "key"
    secret.parent.mkdir(parents=True)
    secret.write_text("secret")
    shown = tmp_path / "shown"
    shown.write_text("shown")
    code = f"""
for name in {str(secret)!r}, {str(shown)!r}, "/etc/shadow", "/etc/passwd":
    attempt(name, lambda: open(name).read())
for name in {str(Path.home())!r}, {str(PACKAGES_ROOT / "tests")!r}, "/var", {str(secret.parent)!r}:
    attempt(name, lambda: os.listdir(name))
"""
    found = outcomes(code, way, View(read_only=(shown,)))
    assert found.pop(str(shown)) == "done"
    if way == "bare":
        assert found[str(secret)] == "done"
        return
    home = found.pop(str(Path.home()))  # there if this Python lies in it, and then nothing else does
    assert home in ("done", "No such file or directory")
    assert set(found.values()) == {"No such file or directory"}


def test_of_a_home_that_python_lies_in_nothing_else_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    for name in ("bin", "lib", "photos", ".local/state"):
        (home / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "base_prefix", str(home))
    code = f"print('home', sorted(os.listdir({str(home)!r})))"
    view = View(read_only=(Path(os.path.realpath(sys.executable)).parent.parent,))
    assert outcomes(code, "contained", view) == {"home": "['bin', 'lib']"}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_can_be_written_but_the_views_folders_and_temporary_ones(way: str, tmp_path: Path) -> None:
    data, state = tmp_path / "data", tmp_path / "data" / "state"
    state.mkdir(parents=True)
    (data / "rows").write_text("1 2 3")
    code = f"""
def write(path):
    with open(path, "a") as file: file.write("x")

attempt("read", lambda: open({str(data / "rows")!r}).read())
attempt("data", lambda: write({str(data / "rows")!r}))
attempt("beside", lambda: write({str(data / "new")!r}))
attempt("state", lambda: write({str(state / "new")!r}))
"""
    if way == "contained":  # without a sandbox this would really be written
        code += f"""
for name in "/", "/usr", "/dev", "/root", {sys.prefix!r}, {str(PACKAGES_ROOT / "worker")!r}:
    attempt(name, lambda: write(name + "/atoll-test"))
for name in "/proc/sys/kernel/core_pattern", "/proc/self/oom_score_adj", "/sys/devices/system/cpu/online":
    attempt(name, lambda: write(name))
for name in "/tmp", "/dev/shm":
    attempt("own" + name, lambda: write(name + "/atoll-test-own"))
"""
    found = outcomes(code, way, View(read_only=(data,), read_write=(state,)))
    allowed = {"read", "state", "own/tmp", "own/dev/shm"}
    assert {name for name, outcome in found.items() if outcome == "done"} == (
        allowed if way == "contained" else {"read", "data", "beside", "state"}
    )
    assert (state / "new").read_text() == "x"
    assert not Path("/tmp/atoll-test-own").exists()
    assert not Path("/dev/shm/atoll-test-own").exists()


@pytest.fixture
def server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize("way", WAYS)
def test_no_server_of_this_machine_can_be_reached(way: str, server: int, tmp_path: Path) -> None:
    name = f"\0atoll-test-{os.getpid()}"
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind(name)
        abstract.listen()
        named.bind(path)
        named.listen()
        code = f"""
attempt("tcp", lambda: connect(socket.AF_INET, ("127.0.0.1", {server})))
attempt("abstract", lambda: connect(socket.AF_UNIX, {name!r}))
attempt("named", lambda: connect(socket.AF_UNIX, {path!r}))
"""
        found = outcomes(code, way)
    if way == "bare":
        assert set(found.values()) == {"done"}
    else:
        assert found == {
            "tcp": "Connection refused",
            "abstract": "Connection refused",
            "named": "No such file or directory",
        }


@pytest.mark.parametrize("way", WAYS)
def test_no_other_process_can_be_seen_read_or_ended(way: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        code = f"""
victim = {victim.pid}
attempt("see", lambda: open(f"/proc/{{victim}}/cmdline").read())
attempt("memory", lambda: open(f"/proc/{{victim}}/mem", "rb").close())
attempt("trace",
        lambda: call("ptrace", 16, victim, 0, 0) or (os.waitpid(victim, 0), call("ptrace", 17, victim, 0, 0)))
print("others", sum(name.isdigit() and int(name) not in (1, os.getpid()) for name in os.listdir("/proc")))
attempt("end", lambda: os.kill(victim, signal.SIGKILL))
"""
        found = outcomes(code, way)
        if way == "bare":
            assert (found["see"], found["end"]) == ("done", "done")
            assert int(found["others"]) > 1
            assert victim.wait() == -9
            return
        assert found == {
            "see": "No such file or directory",
            "memory": "No such file or directory",
            "trace": "No such process",
            "others": "0",
            "end": "No such process",
        }
        assert victim.poll() is None
        victim.communicate(b"\n")


def test_the_parent_that_it_sees_is_not_ours_and_cannot_be_ended() -> None:
    code = """
attempt("parent", lambda: os.kill(os.getppid(), signal.SIGKILL))
attempt("all", lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), os.kill(-1, signal.SIGTERM)))
print("still here")
"""
    assert outcomes(code, "contained")["still"] == "here"


def test_it_has_spaces_of_its_own_no_capability_and_cannot_gain_any() -> None:
    code = """
for name in "net", "pid", "ipc", "uts", "mnt": print("ns", name, os.readlink(f"/proc/self/ns/{name}"))
for line in open("/proc/self/status"):
    if line.startswith(("Cap", "NoNewPrivs")): print(*line.split(":", 1))
attempt("mount", lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None))
attempt("chroot", lambda: os.chroot("/tmp"))
"""
    if "--disable-userns" in probe().options:
        code += 'attempt("userns", lambda: call("unshare", 0x10000000))\n'
    with launched(ATTEMPTS + code, "contained") as made:
        ending = ended(made)
    lines = [line.split() for line in ending.lines]
    spaces = {words[1]: words[2] for words in lines if words[0] == "ns"}
    assert len(spaces) == 5
    assert [name for name, space in spaces.items() if space == os.readlink(f"/proc/self/ns/{name}")] == []
    found = {words[0]: words[1:] for words in lines if words[0] != "ns"}
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert found[name] == ["0" * 16]
    assert found["NoNewPrivs"] == ["1"]
    for name in ("mount", "chroot", "userns"):
        assert found.get(name, ["Operation", "not"])[0] != "done", name


def test_a_view_is_of_absolute_paths_and_known_devices() -> None:
    for wrong in ({"read_only": (Path("data"),)}, {"read_write": (Path("/"),)}, {"device": "tpu"}):
        with pytest.raises(ValueError, match="a view"):
            View(**wrong)  # type: ignore[arg-type]


def pairs(line: list[str], option: str) -> list[str]:
    """The first arguments of an option."""
    return [line[at + 1] for at, word in enumerate(line) if word == option]


def test_a_gpus_nodes_are_given_to_who_computes_on_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-caps", "dri", "dxg")
    for name in (*nodes, "sda", "mem", "kvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sandbox, "DEVICES", tmp_path)
    made = Sandbox("/usr/bin/bwrap")
    line = made.wrapped(["/bin/true"], View(device="cuda"))
    assert sorted(pairs(line, "--dev-bind")) == sorted(str(tmp_path / name) for name in nodes)
    assert "/sys/devices" in pairs(line, "--ro-bind")
    line = made.wrapped(["/bin/true"], View())
    assert pairs(line, "--dev-bind") == []
    assert "/sys/devices" not in pairs(line, "--ro-bind")


def test_inner_folders_of_a_view_are_not_covered_by_outer_ones() -> None:
    view = View(
        read_only=(Path("/data/a/b"), Path("/data")), read_write=(Path("/data/a"), Path("/data/a/b/c"))
    )
    line = Sandbox("/usr/bin/bwrap").wrapped(["/bin/true"], view)
    at = [line.index(path) for path in ("/data", "/data/a", "/data/a/b", "/data/a/b/c")]
    assert at == sorted(at)
    assert [line[i - 1] for i in at] == ["--ro-bind", "--bind", "--ro-bind", "--bind"]


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (
            ["bwrap: Unknown option --disable-userns", "bwrap: setting up uid map: Permission denied"],
            "user name",
        ),
        (
            ["bwrap: No permissions to create new namespace, likely because"],
            "user namespaces are not allowed",
        ),
        (["bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted"], "user namespaces are not allowed"),
        (["bwrap: Can't mount proc on /newroot/proc: Operation not permitted"], "parts of /proc are hidden"),
        (["bwrap: Unknown option --tmpfs"], "does not work here (bwrap: Unknown"),
    ],
)
def test_why_there_is_no_sandbox_is_said_in_words(errors: list[str], words: str) -> None:
    why_not, remedy = sandbox._reason(errors)
    assert words in why_not
    assert remedy


def test_a_program_that_is_not_installed_or_does_not_work_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    look = probe.__wrapped__
    assert look().why_not == "bubblewrap is not installed"
    assert "apt install bubblewrap" in look().remedy
    fake = tmp_path / "bwrap"
    fake.write_text(
        "#!/bin/sh\necho 'bwrap: Creating new namespace failed: Operation not permitted' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    found = look()
    assert not found
    assert found.why_not.startswith("user namespaces are not allowed here (bwrap: Creating")


@pytest.mark.parametrize("way", sandbox._WAYS, ids=["newest", "userns", "plain"])
def test_every_way_to_call_bubblewrap_contains(way: tuple[tuple[str, ...], bool]) -> None:
    program = sandbox_for("contained").program
    made = Sandbox(program, *way)
    found, error = sandbox._run(made.wrapped([sys.executable, "-P", "-c", sandbox._TRIAL], View()))
    if found != "found":
        pytest.skip(f"not this way here: {error}")
    code = "import os; print(os.listdir('/proc/self/task'), open('/proc/sys/kernel/core_pattern', 'a'))"
    done = subprocess.run(
        made.wrapped([sys.executable, "-I", "-c", code], View()), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(("OSError: [Errno 30] Read-only", "PermissionError"))


def test_a_driver_that_finds_other_gpus_inside_is_no_sandbox_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = sandbox_for("contained")
    assert sandbox._with_gpu(found, View(device="cuda")) == found  # here both find the same, mostly none
    monkeypatch.setattr(sandbox, "_GPUS", "import os; print(len(os.listdir('/proc')))")
    without = sandbox._with_gpu(found, View(device="cuda"))
    assert not without
    assert "driver does not work in it" in without.why_not


@pytest.mark.skipif(os.geteuid() != 0, reason="every other test here runs as an ordinary user already")
def test_an_ordinary_user_can_contain_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "python_paths", lambda: [])  # which may lie where that user cannot look
    made = sandbox_for("contained")
    done = subprocess.run(
        made.wrapped(["/bin/sh", "-c", "id -u; echo /proc/[0-9]*; cat /etc/passwd"], View()),
        capture_output=True,
        text=True,
        check=False,
        user=65534,
        group=65534,
        extra_groups=[],
    )
    if done.stderr.startswith("bwrap:"):
        pytest.skip(f"not for an ordinary user here: {sandbox._reason([done.stderr.strip()])[0]}")
    assert done.stdout.splitlines()[0] == "65534"
    assert len(done.stdout.splitlines()[1].split()) <= 3
    assert "No such file" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_torch_computes_the_same_inside(way: str) -> None:
    code = """
import hashlib, torch
torch.manual_seed(1)
torch.set_num_threads(1)
product = torch.randn(300, 300) @ torch.randn(300, 300)
found = hashlib.sha256(product.numpy().tobytes()).hexdigest()
print("torch", torch.backends.cpu.get_cpu_capability(), found)
import worker.stage.stage
"""
    import torch

    with launched(f"import sys; sys.path.insert(0, {str(PACKAGES_ROOT)!r})\n" + code, way) as made:
        ending = ended(made)
    assert str(ending) == "exit code 0", ending.lines
    torch.manual_seed(1)
    product = torch.randn(300, 300) @ torch.randn(300, 300)
    wanted = hashlib.sha256(product.numpy().tobytes()).hexdigest()
    assert ending.lines[-1] == f"torch {torch.backends.cpu.get_cpu_capability()} {wanted}"
