"""What the demos promise, that each broken promise is named, and that they leave nothing behind."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.cli.processes import DemoFailed, Processes
from coordinator.client.fleet_file import read_fleet
from coordinator.client.job_file import load_job
from coordinator.client.prepare import capture_graphs
from coordinator.planning.planner import PlanRequest, make_plan
from examples import demo
from experiments.demo.run import LogReader, play, training_progress
from experiments.demo.scene import Lender, Outcome, Scene, check, next_steps, small_scene, summary
from experiments.demo.shown import Shown
from lab.loopback import LoopbackLab
from protos import atoll_control_pb2 as pb
from protos.coding import plain
from protos.convert import to_proto
from tests.coordinator.cli.test_main import _plan

KEPT = Outcome(
    steps=80,
    stages=4,
    devices=4,
    step_s=1.7,
    predicted_s=1.6,
    single_machine_s=0.4,
    trained_loss=2.428,
    plain_loss=2.428,
    entropy=3.2577,
)
SCENE = Scene(
    "two lend", "job.py", (Lender("one"), Lender("two")), 2, 0.88, ("--steps", "3"), "memory is short"
)

# ---------------------------------------------------------------- promises


def test_a_demo_that_keeps_every_promise_passes() -> None:
    check(KEPT, SCENE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": 1}, "1 stages; at least 2, since memory is short"),
        ({"trained_loss": 2.9, "plain_loss": 2.9}, "0.890 x the unigram entropy; at most 0.88"),
        ({"trained_loss": math.nan, "plain_loss": math.nan}, "nan x the unigram entropy"),
        ({"plain_loss": 2.4285}, "the plain module has 2.428500"),
        ({"trained_loss": math.nan}, "trained to nan"),
    ],
)
def test_a_broken_promise_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DemoFailed, match=words):
        check(replace(KEPT, **changes), SCENE)


def test_all_broken_promises_are_named() -> None:
    with pytest.raises(DemoFailed) as caught:
        check(replace(KEPT, stages=1, plain_loss=3.0), SCENE)
    assert [line.split()[1] for line in str(caught.value).splitlines()] == ["stages;", "loss", "to"]


def test_the_time_is_told_and_never_judged() -> None:
    check(replace(KEPT, step_s=1e6), SCENE)
    assert "all checks hold; 86400 s in all" in summary(KEPT, SCENE, 86_400.0)


def test_what_to_try_next_is_three_commands() -> None:
    lines = next_steps("examples/gpt.py").splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["atoll", "atoll-worker", "atoll"]
    assert "atoll submit examples/gpt.py --watch " in lines[2]
    assert "atoll submit 'my things/job.py' --watch" in next_steps("my things/job.py")


# ---------------------------------------------------------------- scenes


def test_neither_worker_of_the_small_demo_holds_its_model_and_both_together_do(tmp_path: Path) -> None:
    scene = small_scene(tmp_path, 120)
    options = [lender.options for lender in scene.workers]
    assert {given[given.index("--stage-memory") + 1] for given in options} == {"10MiB"}
    job = load_job(Path(scene.job))
    graphs = capture_graphs(job)
    stages = {}
    for count, mib in ((2, 10), (1, 64)):
        devices = [f'[[device]]\nname = "w{at}"\nmemory_mib = {mib}\n' for at in range(count)]
        (tmp_path / "fleet.toml").write_text("".join(devices))
        fleet = read_fleet(tmp_path / "fleet.toml")
        plan = make_plan(PlanRequest("plan", 1, graphs.dag, graphs.eval_dag, job.training, fleet))
        assert plan.prediction is not None
        stages[count] = [stage.memory_bytes for stage in plan.prediction.stages]
    assert len(stages[2]) == 2
    assert stages[1][0] > 10 * 2**20


def test_every_host_of_the_lab_lends_what_the_scenario_says() -> None:
    with LoopbackLab(demo.SCENARIO) as lab:
        scene = demo.scene_of(lab, None)
        with scene.start("fast1", ["-m", "worker.cli", "--help"], stdout=subprocess.PIPE) as worker:
            assert worker.args[:3] == [sys.executable, "-m", "lab.shaped_worker"]
            assert "join" in worker.communicate()[0]
    assert [lender.name for lender in scene.workers] == ["fast1", "slow1", "fast2", "slow2"]
    for lender in scene.workers:
        given = dict(zip(lender.options[::2], lender.options[1::2], strict=True))
        assert given["--stage-memory"] == "30MiB"
        assert given["--site"] == lender.name[:-1]
    assert scene.training == ("--steps", "30", "--for", "45s")
    assert demo.scene_of(lab, 7).training == ("--steps", "7")


# ---------------------------------------------------------------- what is shown


def test_without_a_terminal_progress_is_a_few_lines() -> None:
    text = io.StringIO()
    with Shown(Console(file=text, width=80), clock=iter(range(10**6)).__next__) as shown:
        for at in range(1001):
            shown.progress(at / 1000, f"step {at}")
    lines = text.getvalue().splitlines()
    assert [line.split()[-1] for line in lines[:3]] == ["0", "120", "240"]
    assert len(lines) == 9


def test_on_a_terminal_progress_is_one_bar_below_the_commands() -> None:
    text = io.StringIO()
    with Shown(Console(file=text, width=80, force_terminal=True)) as shown:
        shown.progress(0.25, "joining")
        shown.command("atoll serve")
        shown.progress(0.5, "training")
    assert " 50 %" in text.getvalue()
    assert text.getvalue().count("$ atoll serve") == 1
    assert text.getvalue().endswith("\x1b[2K")  # the bar is gone when it is over


def test_progress_never_goes_back_while_a_job_runs() -> None:
    states = [("loading", 0), ("training", 0), ("training", 5), ("training", 10)]
    states += [("evaluating", 10), ("storing", 10), ("finished", 10)]
    updates = [plain(pb.JobUpdate(job="j-1", state=state, step=step, steps=10)) for state, step in states]
    shares = [training_progress(update)[0] for update in updates]
    assert shares == sorted(shares)
    assert len(set(shares)) == len(shares) - 2


def test_a_log_is_read_on_from_where_it_was_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"event": "a"}\nnot json\n[1]\n{"event"')
    reader = LogReader(path)
    assert [event["event"] for event in reader.events()] == ["a"]
    with path.open("a") as log:
        log.write(': "b"}\n')
    assert [event["event"] for event in reader.events()] == ["b"]
    assert list(reader.events()) == []


# ---------------------------------------------------------------- processes


@pytest.fixture
def heeds_sigint() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, which is inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _printing(*lines: object) -> str:
    return f"for line in {[json.dumps(line) for line in lines]!r}: print(line, flush=True)\n"


STAYS = "import signal\nsignal.pause()\n"
ENROLLED = '{"event": "worker.enrolled", "worker": "w-1", "name": "one"}'
SERVES = (
    f"import sys\nprint({ENROLLED!r}, file=sys.stderr, flush=True)\n"
    + _printing({"address": "127.0.0.1:7", "join_token": "secret"})
    + STAYS
)
TRAINED = pb.JobUpdate(job="demo-1", state="finished", step=3, steps=3, eval_loss=2.0, plan=to_proto(_plan()))
TRAINED.metrics.extend(pb.MetricPoint(step=at, name="step_s", value=0.25) for at in range(4))
QUEUED = pb.JobUpdate(job="demo-1", state="queued", steps=3)


class Stand:
    """Starts a few lines of Python in place of each of Atoll's commands, and notes what it was asked for."""

    def __init__(self, **scripts: str) -> None:
        self.scripts = {
            "serve": SERVES,
            "join": STAYS,
            "submit": _printing(plain(QUEUED), plain(TRAINED)),
            "export": "",
            "job.py": _printing({"held_out_loss": 2.0, "unigram_entropy": 3.0}),
            **scripts,
        }
        self.asked: list[tuple[str, ...]] = []
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(self, host: str, arguments: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        self.asked.append((host, *arguments))
        command = arguments[2] if arguments[0] == "-m" else arguments[0]
        script = self.scripts[command]
        started = subprocess.Popen(
            [sys.executable, "-c", script], text=True, start_new_session=True, **streams
        )
        self.processes.append(started)
        return started

    @property
    def ended(self) -> bool:
        return all(process.returncode is not None for process in self.processes)


def _played(stand: Stand, folder: Path) -> tuple[Outcome, str]:
    text = io.StringIO()
    with Shown(Console(file=text, width=80)) as shown:
        outcome = play(replace(SCENE, start=stand), folder, shown)
    return outcome, text.getvalue()


def test_a_demo_serves_joins_trains_exports_and_evaluates_by_commands(tmp_path: Path) -> None:
    stand = Stand()
    outcome, shown = _played(stand, tmp_path)
    assert outcome == Outcome(3, 2, 2, 0.25, 2.0, 1.0, 2.0, 2.0, 3.0)
    assert stand.ended
    hosts = [(asked[0], asked[3] if asked[1] == "-m" else asked[1]) for asked in stand.asked]
    assert hosts == [
        ("here", "serve"),
        ("one", "join"),
        ("two", "join"),
        ("here", "submit"),
        ("here", "export"),
        ("here", "job.py"),
    ]
    assert [line for line in shown.splitlines() if line.startswith("$")] == [
        "$ atoll serve --listen 127.0.0.1:0",
        "$ atoll-worker join 127.0.0.1:7 --token atoll1_... --name one",
        "$ atoll-worker join 127.0.0.1:7 --token atoll1_... --name two",
        "$ atoll submit job.py --workers 2 --steps 3 --watch",
        "$ atoll export demo-1 -o model.safetensors",
        "$ python job.py --load model.safetensors   (the plain module)",
    ]
    assert "op_fence plan: 2 stages" in shown
    assert "stage 0: device one," in shown  # by the name that the log told
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (
            {"serve": "raise SystemExit('the port is taken')"},
            "coordinator ended early, exit code 1:\nthe port",
        ),
        ({"join": "raise SystemExit('no room')", "submit": STAYS}, " ended early, exit code 1:\nno room"),
        ({"submit": "raise SystemExit('no plan')"}, "submit ended with exit code 1:\nno plan"),
        ({"export": "raise SystemExit(9)"}, "export ended with exit code 9"),
        ({"job.py": "raise SystemExit('another shape')"}, "plain ended with exit code 1:\nanother shape"),
    ],
)
def test_a_process_that_fails_is_named_with_its_words_and_the_others_end(
    broken: dict[str, str], words: str, tmp_path: Path
) -> None:
    stand = Stand(**broken)
    with pytest.raises(DemoFailed) as caught:
        _played(stand, tmp_path)
    assert words in str(caught.value)
    assert stand.ended


@pytest.mark.usefixtures("heeds_sigint")
def test_an_interrupted_demo_ends_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Shown, share: float, words: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Shown, "progress", interrupt)
    stand = Stand(submit=STAYS)
    with pytest.raises(KeyboardInterrupt):
        _played(stand, tmp_path)
    assert len(stand.processes) == 4
    assert stand.ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("heeds_sigint")
def test_an_interrupt_while_a_process_starts_comes_once_it_is_noted(tmp_path: Path) -> None:
    stand = Stand()

    def start(host: str, arguments: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        started = stand(host, arguments, **streams)
        signal.raise_signal(signal.SIGINT)
        return started

    with pytest.raises(KeyboardInterrupt), Processes(tmp_path, start) as processes:
        processes.daemon("one", "one", ["-m", "worker.cli", "join"])
    assert len(stand.processes) == 1
    assert stand.ended


def test_a_process_that_does_not_leave_when_asked_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.cli.processes.LEAVE_S", 0.0)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n" + STAYS
    stand = Stand(join=deaf)
    with Processes(tmp_path, stand) as processes:
        processes.daemon("one", "one", ["-m", "worker.cli", "join"])
        assert processes.first_line("one") == "deaf\n"
    assert [process.returncode for process in stand.processes] == [-signal.SIGKILL]


class ClosedLab:
    """A lab that only knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (None, 0, ""),
        (DemoFailed("1 stages"), 1, "demo failed: 1 stages"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_the_lab_is_gone_however_the_demo_ends(
    error: BaseException | None,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lab = ClosedLab()

    def played(scene: Scene, folder: Path, shown: Shown) -> Outcome:
        if error is not None:
            raise error
        return KEPT

    monkeypatch.setattr(demo, "open_lab", lambda loopback, shown: lab)
    monkeypatch.setattr(demo, "scene_of", lambda lab, steps: SCENE)
    monkeypatch.setattr(demo, "play", played)
    assert demo.main([]) == code
    out, err = capsys.readouterr()
    assert words in err
    assert ("all checks hold" in out) == (code == 0)
    assert lab.closed
