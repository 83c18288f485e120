import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import UsageError
from atoll.microbatch import ScheduleName
from atoll.plan import LinkPrediction, Plan, Prediction, StagePrediction, StageSpec, one_replica
from coordinator.cli.fleet.admin import parse_duration
from coordinator.cli.main import app
from coordinator.cli.views.format import in_bytes, in_seconds, share_bar, sparkline
from coordinator.config import CoordinatorConfig
from hostos.command_line import run
from hostos.net.addresses import parse_address
from protos import atoll_control_pb2 as pb
from protos.coding import plain
from protos.convert import to_proto
from protos.credentials import JoinToken, shortened
from protos.short_tokens import ShortToken
from tests.coordinator.client.fake_owner import JOIN_TOKEN, FakeOwnerServer, Script
from tests.interrupts import interrupted, own_session
from tests.parameters import sampled

ROOT = Path(__file__).resolve().parents[3]
JOB = """
import torch
from atoll import Job, Rows, TrainingSpec

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()

def job():
    rows = {"x": torch.randn(32, 8, generator=torch.Generator().manual_seed(1))}
    training = TrainingSpec(steps=10, n_micro=2, eval_batches=2)
    return Job(Net(), {"x": torch.zeros(4, 8)}, Rows(rows, rows), training)
"""
MISREAD = """
import torch
from atoll import Job, Rows, TrainingSpec
from tests.coordinator.capture.test_self_check import {kind}

def job():
    rows = {{"x": torch.linspace(-2, 2, 96).reshape(16, 6)}}
    return Job({kind}(), {{"x": torch.zeros(4, 6)}}, Rows(rows), TrainingSpec(steps=2, n_micro=2))
"""
ENDLESS = """
import os
import threading
import torch
from atoll import Job, Rows, TrainingSpec

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)

    def forward(self, x):
        os.write(1, b"capturing\\n")
        threading.Event().wait()
        return self.fc(x).mean()

def job():
    return Job(Net(), {"x": torch.zeros(4, 8)}, Rows({"x": torch.zeros(32, 8)}), TrainingSpec(2, 1))
"""
FLEET = """
[[device]]
name = "one"
[[device]]
name = "two"
"""


@pytest.fixture
def script() -> Script:
    return Script(
        status=pb.StatusReply(
            version="0.1.0",
            workers=[pb.WorkerStatus(worker="w-1", name="fast1", state="pool", gflops=50)],
            jobs=[pb.JobUpdate(job="j-1", name="gpt", state="running", step=3, steps=10, loss=2.5)],
            links=[pb.LinkStatus(source="w-1", target="w-2", bandwidth_bps=8e6, latency_s=0.04)],
        )
    )


@pytest.fixture
def server(script: Script) -> Iterator[FakeOwnerServer]:
    with FakeOwnerServer(script) as server:
        yield server


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(JOB)
    return str(tmp_path / "net.py")


def _plan() -> Plan:
    return Plan(
        job="plan",
        version=1,
        dag_hash="a" * 64,
        eval_dag_hash="b" * 64,
        partitioner="op_fence",
        schedule=ScheduleName.ONE_F_ONE_B,
        n_micro=8,
        replicas=one_replica(8, (StageSpec(0, 9, 0, 9, "w-1", 1), StageSpec(9, 12, 9, 12, "w-2", 0))),
        left_out=(("w-3", "slower than its link"),),
        prediction=Prediction(
            step_s=2.0,
            lower_bound_s=1.6,
            bottleneck="link w-1>w-2",
            reason="occupied 76 % of the step",
            stages=(
                StagePrediction("w-1", 1.0, 0.5, 2**20, 2**22),
                StagePrediction("w-2", 0.5, 0.25, 2**20, 2**22),
            ),
            links=(LinkPrediction("w-1", "w-2", 4_000_000, 1.5),),
            single_machine_s=1.0,
            single_machine="w-1",
            notes=("would train 2.0x faster on w-1 alone",),
        ),
    )


def _words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------- asking


def test_status_shows_workers_jobs_and_links(
    server: FakeOwnerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["status", *server.options]) == 0
    words = _words(capsys)
    for part in (
        "name fast1, state pool",
        "name gpt, state running",
        "step 3/10, loss 2.5000",
        "fast1 > w-2",
    ):
        assert part in words


def test_status_json_has_every_field_under_its_own_name(
    server: FakeOwnerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["status", "--json", *server.options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workers"][0]["name"] == "fast1"
    assert found["jobs"][0] | {"step": 3, "loss": 2.5, "eval_loss": None} == found["jobs"][0]


def test_a_plan_for_a_fleet_in_a_file_needs_no_coordinator(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    picture = tmp_path / "plan.png"
    code = run(
        app, ["plan", job_file, "--fleet", str(tmp_path / "fleet.toml"), "--json", "--plot", str(picture)]
    )
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["partitioner"] == "op_fence"
    assert found["prediction"]["step_s"] >= found["prediction"]["lower_bound_s"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plan_shows_the_codec_of_each_link_and_why(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    wide = JOB.replace("(8, 8)", "(512, 512)").replace("(32, 8,", "(32, 512,").replace("(4, 8)", "(4, 512)")
    Path(job_file).write_text(wide)
    command = ["plan", job_file, "--fleet", str(tmp_path / "fleet.toml"), "--partitioner", "even"]
    assert run(app, [*command, "--compress", "topk:8", "--json"]) == 0
    links = json.loads(capsys.readouterr().out)["links"]
    assert {(link["codec"], link["ratio"]) for link in links} == {("topk", 8.0)}
    assert run(app, [*command, "--set", "compress=fp16", "--compress", "topk:8"]) == 0
    words = _words(capsys)
    assert "codec topk:8, gradients same" in words
    assert "asked for on every link" in words


def test_a_way_of_the_table_is_the_plan_that_its_options_make(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fleet.toml").write_text("[default]\nmbit = 10000\nms = 0.01\ngflops = 0.01\n" + FLEET)

    def planned(*options: str) -> dict[str, Any]:
        command = ["plan", job_file, "--fleet", str(tmp_path / "fleet.toml"), "--json", *options]
        assert run(app, command) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    ways = [way for way in planned("--exchange", "auto")["ways"] if not way["why_not"]]
    assert len(ways) >= 4
    for way in ways:
        step_s = planned(*way["options"].split())["prediction"]["step_s"]
        assert (way["options"], step_s) == (way["options"], way["step_s"])


def test_a_site_is_also_planned_as_a_worker_per_card(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = '[[device]]\nname = "rack"\ndevices = 2\ninside_gbps = 0.001\ninside_us = 1e6\n'
    (tmp_path / "fleet.toml").write_text(site)
    command = ["plan", job_file, "--fleet", str(tmp_path / "fleet.toml")]
    assert run(app, [*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (reading,) = found["readings"]
    assert (reading["sites"], reading["cards"], reading["better"]) == (["rack"], [2], True)
    assert reading["step_s"] < reading["given_step_s"] == found["prediction"]["step_s"]
    assert "--devices cuda:0,cuda:1" in reading["remedy"]
    assert run(app, command) == 0
    words = _words(capsys)
    assert "rack as 2 workers, one per card: " in words
    assert "--devices cuda:0,cuda:1" in words


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("gzip:3", "codec gzip is not known"),
        ("powersgd", "not valid for activations"),
        ("??", "not understood"),
    ],
)
def test_a_compression_that_links_cannot_do_is_refused_with_those_they_can(
    how: str, words: str, job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    command = ["plan", job_file, "--fleet", str(tmp_path / "fleet.toml"), "--compress", how]
    assert run(app, command) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert words in shown
    assert "give off, lossless, auto" in shown


def test_a_live_plan_is_shown_with_the_names_of_its_devices(
    script: Script, server: FakeOwnerServer, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script.plan = pb.PlanReply(plan=to_proto(_plan()), fleet=script.status.workers)
    assert run(app, ["plan", job_file, *server.options]) == 0
    words = _words(capsys)
    for part in (
        "stage 0: device fast1, ops 0-8",
        "predicted step: 2.00 s",
        "1.25x",
        "left out: w-3: slower",
        "76 % of the step",
    ):
        assert part in words


@pytest.mark.parametrize("workers", [[], [pb.WorkerStatus(worker="w-1", state="left")]])
def test_the_pool_is_looked_at_before_a_model_is_captured(
    workers: list[pb.WorkerStatus],
    script: Script,
    server: FakeOwnerServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "never.py").write_text("raise SystemExit('the job file was run')")
    script.status = pb.StatusReply(version="0.1.0", workers=workers)
    assert run(app, ["plan", str(tmp_path / "never.py"), *server.options]) == 4
    assert "no worker is in the pool of 127.0.0.1" in capsys.readouterr().err
    assert run(app, ["submit", str(tmp_path / "never.py"), *server.options]) == 2
    words = capsys.readouterr().err
    assert words.index("the job will wait until one joins") < words.index("the job file was run")


def test_ops_lists_what_the_model_uses(job_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["ops", job_file, "--json"]) == 0
    assert {"aten.linear.default", "aten.relu.default"} <= {
        use["op"] for use in json.loads(capsys.readouterr().out)
    }


def test_version_tells_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["version", "--json"]) == 0
    assert {"atoll", "protocol", "python", "torch"} <= json.loads(capsys.readouterr().out).keys()


# ---------------------------------------------------------------- doing


def test_submit_uploads_everything_the_spec_names(
    script: Script, server: FakeOwnerServer, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", "optimizer.lr=0.5", "--steps", "7", "--name", "mine"]
    assert run(app, ["submit", job_file, "--json", *sets, *server.options]) == 0
    assert json.loads(capsys.readouterr().out) == {"job": "j-1", "state": "queued", "reason": "fleet is busy"}
    [request] = script.submissions.values()
    spec = request.spec
    assert (spec.name, spec.training.steps, spec.training.optimizer.lr) == ("mine", 7, 0.5)
    named = {spec.dag_hash, spec.eval_dag_hash, *(t.blob for t in spec.tensors)}
    named |= {f.blob for f in (*spec.data.fields, *spec.eval_data.fields)}
    assert named == script.blobs.keys()
    assert {t.name for t in spec.tensors} == {f"layers.{i}.{p}" for i in range(3) for p in ("weight", "bias")}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("CountsInPython", "forward changes attribute 'calls'"),
        ("ReboundBuffer", "buffer 'level' after a training forward"),
    ],
)
def test_a_model_that_would_be_trained_wrongly_is_refused_by_name_and_never_sent(
    kind: str,
    named: str,
    script: Script,
    server: FakeOwnerServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "misread.py").write_text(MISREAD.format(kind=kind))
    assert run(app, ["submit", str(tmp_path / "misread.py"), *server.options]) == 3
    assert named in capsys.readouterr().err
    assert (script.submissions, script.blobs, script.partial) == ({}, {}, {})


def test_watching_prints_plain_lines_where_there_is_no_terminal(
    script: Script, server: FakeOwnerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    running = pb.JobUpdate(
        job="j-1", state="running", step=1, steps=2, loss=3.25, samples_per_s=51.2, eta_s=60
    )
    running.stages.add(stage=0, worker="w-1", busy_share=0.5)
    script.updates = [running, pb.JobUpdate(job="j-1", state="finished", step=2, steps=2)]
    assert run(app, ["watch", "j-1", *server.options]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == "j-1 running, step 1/2, loss 3.2500, 51.2 samples/s, ETA 1m00s, busy 50%"
    assert last.startswith("j-1 finished, step 2/2")


def test_a_job_that_fails_ends_watch_with_exit_code_8(
    script: Script, server: FakeOwnerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    script.updates = [pb.JobUpdate(job="j-1", state="failed", step=4, reason="loss is NaN")]
    assert run(app, ["watch", "j-1", "--json", *server.options]) == 8
    assert "loss is NaN" in capsys.readouterr().err


def test_cancel_tells_which_checkpoint_is_left(
    script: Script, server: FakeOwnerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["cancel", "j-1", *server.options]) == 0
    assert script.cancelled == ["j-1"]
    assert "checkpoint of step 5" in _words(capsys)


def test_several_jobs_are_forgotten_at_once(
    script: Script, server: FakeOwnerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["forget", "j-1", "j-2", *server.options]) == 0
    assert script.forgotten == ["j-1", "j-2"]
    assert "j-1, j-2 forgotten" in _words(capsys)


def test_logs_read_as_lines(
    script: Script, server: FakeOwnerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    script.lines = [
        pb.LogLine(level="info", event="plan.made", source="coordinator", fields_json='{"stages": 3}')
    ]
    script.lines.append(pb.LogLine(level="info", event="odd", fields_json="{"))
    worker = "w-7f3a2c9e05b1d846"
    script.lines.append(pb.LogLine(event="stage.waits", source=worker, fields_json=f'{{"for": "{worker}"}}'))
    script.status.workers.add(worker=worker, name="attic")
    assert run(app, ["logs", *server.options]) == 0
    said = capsys.readouterr().out
    assert "plan.made stages=3" in said
    assert "attic stage.waits for=attic" in " ".join(said.split())


def test_the_trace_is_written_for_perfetto(script: Script, server: FakeOwnerServer, tmp_path: Path) -> None:
    assert run(app, ["trace", "j-1", "-o", str(tmp_path / "t.json"), *server.options]) == 2
    spans = pb.Spans(job="j-1", spans=[pb.Span(kind="F", step=1, start_s=1.0, end_s=2.0)])
    script.chunks = [pb.TraceChunk(worker="w-1", spans=spans)]
    assert run(app, ["trace", "j-1", "-o", str(tmp_path / "t.json"), *server.options]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_tokens_are_made_for_scripts_and_for_people(
    server: FakeOwnerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["token", "create", "--name", "lab", "--expires", "24h", "--json", *server.options]) == 0
    made = json.loads(capsys.readouterr().out)
    token = ShortToken.decode(made["token"])
    assert (token.host, token.port, made["expires_s"]) == ("127.0.0.1", server.port, 86400.0)
    assert made["join_command"] == f"atoll-worker join --token {made['token']}"
    assert run(app, ["token", "create", "--host", "lab.example.org", *server.options]) == 0
    short = shortened(JoinToken.decode(JOIN_TOKEN), "lab.example.org", server.port)
    assert f"atoll-worker join --token {short.encode()}" in _words(capsys)
    assert run(app, ["token", "create", "--host", "lab.example.org", "--long", *server.options]) == 0
    assert f"atoll-worker join lab.example.org:{server.port} --token {JOIN_TOKEN}" in _words(capsys)
    assert run(app, ["token", "revoke", "t-1", *server.options]) == 0
    assert run(app, ["token", "list", *server.options]) == 0
    assert "revoked" in _words(capsys)


def test_a_worker_is_kicked_by_id_or_name(
    script: Script, server: FakeOwnerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["kick", "fast1", "--for-good", "--reason", "wrong sums", *server.options]) == 0
    assert (script.kicked[0].worker, script.kicked[0].for_good, script.kicked[0].reason) == (
        "w-1",
        True,
        "wrong sums",
    )
    assert run(app, ["kick", "nobody", *server.options]) == 2
    assert "w-1 (fast1)" in capsys.readouterr().err


# ---------------------------------------------------------------- going wrong


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["status", "--coordinator", "127.0.0.1:9", "--insecure"],
            5,
            "no coordinator answers at 127.0.0.1:9",
        ),
        (["status", "--coordinator", "127.0.0.1:9", "--token", "hello"], 6, "not a join token"),
        (["status"], 2, "give --coordinator"),
        (["plan", "nowhere.py", "--fleet", "fleet.toml"], 2, "nowhere.py is not there"),
        (["ops", "nowhere.py"], 2, "is not there"),
        (["stauts"], 2, "No such command"),
        (["submit"], 2, "Missing argument"),
        (["token", "create", "--expires", "soon"], 2, "duration 'soon'"),
    ],
)
def test_what_goes_wrong_has_an_exit_code_and_a_next_move_and_no_traceback(
    arguments: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path))
    assert run(app, arguments) == code
    shown = capsys.readouterr().err
    assert words in shown
    assert "Traceback" not in shown


def test_a_job_file_that_raises_is_told_by_its_own_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text("def job():\n    return {}['width']\n")
    (tmp_path / "fleet.toml").write_text(FLEET)
    assert run(app, ["plan", str(tmp_path / "bad.py"), "--fleet", str(tmp_path / "fleet.toml")]) == 2
    shown = capsys.readouterr().err
    assert "bad.py:2: KeyError: 'width'" in shown
    assert "Traceback" not in shown


def test_a_model_too_large_for_the_fleet_says_by_how_much(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fleet.toml").write_text("[default]\nmemory_mib = 1\n" + FLEET)
    wide = JOB.replace("(8, 8)", "(512, 512)").replace("(32, 8,", "(32, 512,").replace("(4, 8)", "(4, 512)")
    Path(job_file).write_text(wide)
    assert run(app, ["plan", job_file, "--fleet", str(tmp_path / "fleet.toml")]) == 4
    assert "MiB" in capsys.readouterr().err


def test_nothing_heavy_is_imported_before_a_command_needs_it() -> None:
    heavy = "{'torch', 'matplotlib', 'scipy', 'networkx', 'sqlalchemy'}"
    code = f"import sys, coordinator.cli.main; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---------------------------------------------------------------- Ctrl+C


def ctrl_c(arguments: list[str], once: str) -> None:
    """Interrupt a command once it has printed ``once``: it ends with 130 and no traceback."""
    command = [sys.executable, "-m", "coordinator.cli", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with own_session(command, **pipes, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        assert any(once in line for line in process.stdout)
        assert interrupted(process) == 130
        _, shown = process.communicate()
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", sampled(1, ["watch", "submit"]))
def test_ctrl_c_ends_a_watch_within_two_seconds(
    command: str, script: Script, server: FakeOwnerServer, job_file: str
) -> None:
    script.hold = threading.Event()
    script.updates = [pb.JobUpdate(job="j-1", state="running", step=1, steps=2)]
    arguments = ["watch", "j-1"] if command == "watch" else ["submit", job_file, "--watch"]
    ctrl_c([*arguments, *server.options], "running, step 1/2")
    assert script.cancelled == []


@pytest.mark.parametrize("command", sampled(1, ["submit", "plan"]))
def test_ctrl_c_ends_a_capture_within_two_seconds(
    command: str, script: Script, server: FakeOwnerServer, tmp_path: Path
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    ctrl_c([command, str(tmp_path / "endless.py"), *server.options], "capturing")
    assert script.submissions == {}


# ---------------------------------------------------------------- words


def test_numbers_are_written_for_people() -> None:
    assert [in_bytes(n) for n in (7, 1536, 3 * 2**30)] == ["7 B", "1.5 KiB", "3.0 GiB"]
    assert [in_seconds(s) for s in (0.0123, 2.5, 75, 7260, 180_000)] == [
        "12.3 ms",
        "2.50 s",
        "1m15s",
        "2h01m",
        "2d02h",
    ]
    assert share_bar(0.5) == "█████·····  50%"
    assert sparkline([1, 2, float("nan"), 3]) == "▁▅█"


def test_an_unset_optional_is_none_and_an_unset_number_is_zero() -> None:
    found = plain(pb.JobUpdate(job="j-1"))
    assert (found["loss"], found["step"], found["stages"]) == (None, 0, [])


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("7d", 604800)])
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1w"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="24h"):
        parse_duration(text)


# ---------------------------------------------------------------- for scripts


def test_the_shipped_fleet_file_plans_the_shipped_gpt(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "LAYERS=1", "--set", "WIDTH=32", "--set", "LENGTH=16"]
    command = ["plan", str(ROOT / "examples/gpt.py"), "--fleet", str(ROOT / "examples/fleet.toml"), *small]
    assert run(app, [*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["names"].keys() == {"lab1", "lab2", "home1", "home2"}
    assert found["prediction"]["step_s"] > 0


def test_a_kicked_worker_and_a_revoked_token_are_told_as_json(
    script: Script, server: FakeOwnerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["kick", "fast1", "--reason", "wrong sums", "--json", *server.options]) == 0
    kicked = {"worker": "w-1", "reason": "wrong sums", "for_good": False}
    assert json.loads(capsys.readouterr().out) == kicked
    assert run(app, ["token", "create", *server.options]) == 0
    capsys.readouterr()
    assert run(app, ["token", "revoke", "t-1", "--json", *server.options]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": "t-1", "revoked": True}


@pytest.mark.parametrize(("given", "quota"), [([], 512 * 2**30), (["--blob-quota", "1.5TiB"], 3 * 2**39)])
def test_serve_takes_in_as_many_bytes_as_its_owner_says(
    given: list[str], quota: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[CoordinatorConfig] = []
    monkeypatch.setattr("coordinator.server.serve_forever", lambda config, announce: configs.append(config))
    assert run(app, ["serve", "--state-dir", str(tmp_path), *given]) == 0
    assert [config.blob_quota_bytes for config in configs] == [quota]


def test_serve_tells_scripts_in_one_line_once_it_listens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coordinator.cli", "serve", "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(
        [*command, "--state-dir", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        with socket.create_connection(parse_address(told["address"]), 20):
            pass
        process.terminate()
        rest = process.stdout.read()
    assert (process.returncode, rest) == (0, "")
    host, port = parse_address(told["address"])
    short = shortened(JoinToken.decode(told["join_token"]), host, port)
    assert told["join_command"] == f"atoll-worker join --token {short.encode()}"
    assert JoinToken.decode(told["join_token"]).work_port == parse_address(told["work_address"])[1]
    assert (told["state_dir"], told["insecure"]) == (str(tmp_path), False)


def test_serve_refuses_a_database_url_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coordinator.cli", "serve", "--listen", "127.0.0.1:0"]
    options = ["--state-dir", str(tmp_path), "--database", "nonsense://host/atoll"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "postgresql://USER@HOST/NAME" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("package", ["coordinator", "worker"])
def test_ctrl_c_while_modules_load_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    entry = importlib.import_module(f"{package}.cli.__main__")

    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == f"{package}.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, f"{package}.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
