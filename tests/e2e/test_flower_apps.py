"""Unmodified Flower apps on our coordinator and two workers, all real processes with TLS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.patience import HUNG_S, eventually

pytest.importorskip("flwr")

from atoll.errors import AtollError, JobFailed, NoWorkers, UsageError
from benchmarks.real_workers import LoopbackFleet
from coordinator.flower.launcher import AppCommand
from hostos import command_line
from tests.coordinator.flower.flower_apps import accept, command, restart_coordinator, run, write_app
from tests.e2e.contained import assert_no_torch
from worker.apps.store import AppStore
from worker.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "flower_digits"
LISTED = {  # stock Flower's own, simulation and deployment alike
    2: [0.5972, 0.7139, 0.8000, 0.8639, 0.8694],
    4: [0.5806, 0.6917, 0.7333, 0.8278, 0.8722],
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(2, options=("--allow-apps", "--node-config", 'site="lab"')) as started:
        yield started


def free(fleet: LoopbackFleet) -> bool:
    """Whether every worker is back in the pool."""
    return [w.state for w in fleet.client.status().workers if w.state not in ("dead", "left")].count(
        "pool"
    ) == fleet.workers


def failure(running: AppCommand) -> AtollError:
    """What ended a run that must not succeed."""
    with running:
        try:
            for _ in running.events():
                pass
        except AtollError as error:
            return error
    pytest.fail("the run ended well")


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{process}/status").read_text()


# ---------------------------------------------------------------- the same results


@pytest.mark.parametrize("nodes", LISTED)
def test_the_digits_app_gives_exactly_flowers_accuracies(nodes: int, tmp_path: Path) -> None:
    with LoopbackFleet(nodes, options=("--allow-apps",)) as fleet:
        out = tmp_path / "found.json"
        found, events = run(fleet, DIGITS, out, nodes, **{"min-nodes": nodes})
    assert [round(share, 4) for share in found["acc"][1:]] == LISTED[nodes]
    rounds = [e["round"] for e in events if e["event"] == "round"]
    assert rounds == [1, 2, 3, 4, 5]
    shown = [e["metrics"]["acc"] for e in events if e["event"] == "metrics" and e["of"] == "server"]
    assert [round(share, 4) for share in shown[1:]] == LISTED[nodes]
    costs = [e for e in events if e["event"] == "replies"]
    # What round r evaluates, round r + 1 trains on: it goes down once.
    trained = costs[2::2]
    assert all(cost["down_bytes"] < 5_000 * nodes for cost in trained)
    assert all(cost["replies"] == nodes and not cost["errors"] for cost in costs)


def test_the_daemons_map_no_torch_while_an_app_runs(fleet: LoopbackFleet, tmp_path: Path) -> None:
    accept(fleet, DIGITS)
    config = {"out": str(tmp_path / "found.json"), "min-nodes": 2}
    with command(fleet, DIGITS, 2, **config) as running:
        for _ in running.events():
            assert_no_torch(process.pid for process in fleet._processes[1:])
    assert (tmp_path / "found.json").exists()


# ---------------------------------------------------------------- what apps use

NOTHING = "def run(grid, context):\n    return 1\n"
RAISING = "def run(grid, context):\n    raise KeyError('mine')\n"
EXITING = "import os\n\ndef run(grid, context):\n    os._exit(7)\n"

EVERYTHING = """
def counting_mod(message, context, call_next):
    count = context.state.get("seen", MetricRecord({"n": 0}))["n"] + 1
    context.state["seen"] = MetricRecord({"n": count})
    return call_next(message, context)


app = ClientApp(mods=[counting_mod])


@app.lifespan()
def lifespan(context):
    begun = context.state.get("life", MetricRecord({"begun": 0, "ended": 0}))
    context.state["life"] = MetricRecord({"begun": begun["begun"] + 1, "ended": begun["ended"]})
    yield
    life = context.state["life"]
    context.state["life"] = MetricRecord({"begun": life["begun"], "ended": life["ended"] + 1})


def answer(message, context, **more):
    state = context.state
    facts = {"pid": os.getpid(), "seen": state["seen"]["n"], "begun": state["life"]["begun"], **more}
    return Message(RecordDict({"m": MetricRecord(facts)}), reply_to=message)


@app.train()
def train(message, context):
    weights = context.state.get("weights", ArrayRecord({"w": Array(np.zeros(50_000))}))
    weights = ArrayRecord({"w": Array(weights["w"].numpy() + message.content["arrays"]["w"].numpy())})
    context.state["weights"] = weights
    return answer(message, context, total=float(weights["w"].numpy().sum()))


@app.query()
def query(message, context):
    facts = {**context.node_config, "lr": context.run_config["lr"], "run": context.run_id}
    facts["kind"] = message.metadata.message_type
    return Message(RecordDict({"c": ConfigRecord(facts)}), reply_to=message)


@app.query("odd_records")
def odd_records(message, context):
    echo = RecordDict(dict(message.content))
    return Message(echo, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    raise ValueError(f"partition {context.node_config['partition-id']} cannot")


@app.query("die")
def die(message, context):
    os._exit(3)


@app.query("hang")
def hang(message, context):
    time.sleep(600)


@app.query("large")
def large(message, context):
    count = context.state.get("large", MetricRecord({"n": -1}))["n"] + 1
    context.state["large"] = MetricRecord({"n": count})
    arrays = ArrayRecord({"x": Array(np.full(300_000, count))})
    return Message(RecordDict({"a": arrays}), reply_to=message)


@app.query("no_message")
def no_message(message, context):
    return 7
"""


def test_actions_mods_lifespan_state_and_records_are_as_in_flower(fleet, tmp_path: Path) -> None:
    server = """
    import numpy as np
    from flwr.app import Array

    def run(grid, context):
        arrays = RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(50_000))})})
        odd = RecordDict({
            "a": ArrayRecord({
                "f": Array(np.arange(6, dtype=np.float16).reshape(2, 3)), "scalar": Array(np.array(3.5)),
                "none": Array(np.zeros((0, 4), np.int8)), "big": Array(np.arange(300_000)),
            }),
            "m": MetricRecord({"i": -(2**62), "f": 1e-300, "list": [1.5, 2.5], "empty": []}),
            "c": ConfigRecord({
                "t": "ä", "b": bytes(range(256)) * 100, "flag": True, "flags": [True, False],
                "texts": ["x", ""],
            }),
        })
        trained = [said(ask(grid, "train", arrays)) for _ in range(3)]
        echoed = ask(grid, "query.odd_records", odd)
        same = [
            all(e.content["a"][k].numpy().tolist() == odd["a"][k].numpy().tolist()
                and e.content["a"][k].dtype == odd["a"][k].dtype for k in odd["a"])
            and dict(e.content["m"]) == dict(odd["m"]) and dict(e.content["c"]) == dict(odd["c"])
            and list(e.content) == ["a", "m", "c"]
            for e in echoed
        ]
        facts = said(ask(grid, "query"))
        names = [n.name for n in grid.get_nodes()]
        return {"trained": trained, "same": same, "facts": facts, "names": names, "run": grid.run.run_id}
    """
    app = write_app(tmp_path, "everything", server, EVERYTHING, "lr = 0.1")
    found, _ = run(fleet, app, tmp_path / "out.json", 2, lr=0.25)
    for number, replies in enumerate(found["trained"], 1):
        assert [r["m"]["total"] for r in replies] == [50_000.0 * number] * 2
        assert [r["m"]["seen"] for r in replies] == [number] * 2
        assert [r["m"]["begun"] for r in replies] == [number] * 2
    # One warm process a node.
    assert len({r["m"]["pid"] for replies in found["trained"] for r in replies}) == 2
    assert found["same"] == [True, True]
    facts = [reply["c"] for reply in found["facts"]]
    assert [f["partition-id"] for f in facts] == [0, 1]
    assert {(f["num-partitions"], f["site"], f["lr"], f["kind"]) for f in facts} == {
        (2, "lab", 0.25, "query")
    }
    assert {f["run"] for f in facts} == {found["run"]}
    assert found["names"] == ["worker0", "worker1"]
    eventually(lambda: free(fleet))


def test_errors_come_back_as_flowers_error_replies_and_the_node_goes_on(fleet, tmp_path: Path) -> None:
    server = """
    def run(grid, context):
        found = {"raised": said(ask(grid, "evaluate"))}
        found["unknown"] = said(ask(grid, "query.nobody_has_this"))
        found["no_message"] = said(ask(grid, "query.no_message"))
        found["died"] = said(ask(grid, "query.die"))
        found["late"] = said(ask(grid, "query.hang", timeout=0.5))
        found["absent"] = said(ask(grid, "query", nodes=[4711]))
        found["after"] = said(ask(grid, "query"))
        return found
    """
    app = write_app(tmp_path, "errors", server, EVERYTHING, "lr = 0.1")
    found, events = run(fleet, app, tmp_path / "out.json", 2)
    assert [r["error"] for r in found["raised"]] == [2, 2]
    assert [f"partition {n} cannot" in r["reason"] for n, r in enumerate(found["raised"])] == [True, True]
    assert [r["error"] for r in found["unknown"]] == [2, 2]
    assert "No query function registered" in found["unknown"][0]["reason"]
    assert "returned int, no Message" in found["no_message"][0]["reason"]
    assert [(r["error"], "exit code 3" in r["reason"]) for r in found["died"]] == [(8, True)] * 2
    assert found["late"] == []
    assert [r["error"] for r in found["absent"]] == [5]
    assert [r["c"]["partition-id"] for r in found["after"]] == [0, 1]
    told = [e for e in events if e["event"] == "replies"]
    assert told[4]["late"] == 2
    assert len(told[0]["errors"]) == 2
    assert "worker0" in told[0]["errors"][0]


NUMPY_CLIENT = """
from flwr.client import NumPyClient


class Client(NumPyClient):
    def __init__(self, partition):
        self.partition = partition

    def fit(self, parameters, config):
        return [p + self.partition + 1 for p in parameters], 10, {"rate": 0.5}

    def evaluate(self, parameters, config):
        return float(parameters[0].sum()), 10, {"accuracy": 0.25}


def client_fn(context):
    return Client(context.node_config["partition-id"]).to_client()


app = ClientApp(client_fn=client_fn)
"""

NUMPY_SERVER = """
import numpy as np
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg


class Recording(FedAvg):
    def aggregate_fit(self, server_round, results, failures):
        found = super().aggregate_fit(server_round, results, failures)
        self.last = [a.tolist() for a in parameters_to_ndarrays(found[0])]
        with open(OUT, "w") as file:
            json.dump({"last": self.last, "failures": len(failures), "results": len(results)}, file)
        return found


def server_fn(context):
    global OUT
    OUT = context.run_config["out"]
    start = ndarrays_to_parameters([np.zeros(3), np.zeros((2, 2))])
    least = {"min_fit_clients": 2, "min_evaluate_clients": 2, "min_available_clients": 2}
    strategy = Recording(initial_parameters=start, **least)
    return ServerAppComponents(config=ServerConfig(num_rounds=2), strategy=strategy)


app = ServerApp(server_fn=server_fn)
"""


def test_a_legacy_app_with_numpy_clients_runs_too(fleet, tmp_path: Path) -> None:
    app = write_app(tmp_path, "legacy", NUMPY_SERVER, NUMPY_CLIENT)
    found, _ = run(fleet, app, tmp_path / "out.json", 2)
    # Each round adds the mean of 1 and 2.
    assert found == {"last": [[3.0] * 3, [[3.0] * 2] * 2], "failures": 0, "results": 2}


# ---------------------------------------------------------------- consent


def test_an_app_runs_only_where_its_owner_accepted_its_hash(fleet, tmp_path: Path) -> None:
    app = write_app(tmp_path, "unasked", NOTHING, "app = ClientApp()\n")
    refused = failure(command(fleet, app))
    assert isinstance(refused, NoWorkers)
    assert "on 2 of 2 that run apps (worker0, worker1) the owner has not accepted" in str(refused)
    assert "atoll-worker apps accept" in str(refused)
    found, _ = run(fleet, app, tmp_path / "out.json", 2)
    assert found == 1
    # A changed file is another app.
    (app / "unasked" / "client.py").write_text("app = None\n")
    assert isinstance(failure(command(fleet, app)), NoWorkers)


def test_a_word_of_the_owner_lets_a_waiting_run_begin(fleet, tmp_path: Path) -> None:
    app, out = write_app(tmp_path, "waiting", NOTHING, "app = ClientApp()\n"), tmp_path / "out.json"
    with command(fleet, app, 2, wait_s=60.0, out=str(out)) as running:
        told = False
        for event in running.events():
            if event["event"] == "waiting" and "on 2 of 2" in event["reason"] and not told:
                told = True
                [asked, *_] = AppStore(fleet.state.parent / "worker0").known()
                assert (asked.name, asked.accepted) == ("waiting", False)
                for n in range(2):
                    folder = str(fleet.state.parent / f"worker{n}")
                    assert (
                        command_line.run(cli.app, ["apps", "accept", asked.hash[:12], "--state-dir", folder])
                        == 0
                    )
    assert json.loads(out.read_text()) == 1


def test_a_worker_without_allow_apps_is_never_asked(tmp_path: Path) -> None:
    app = write_app(tmp_path, "asked", NOTHING, "app = ClientApp()\n")
    with LoopbackFleet(1) as fleet:
        accept(fleet, app)
        refused = failure(command(fleet, app))
    assert isinstance(refused, NoWorkers)
    assert "1 of 1 workers do not run apps" in str(refused)
    assert "--allow-apps" in str(refused)


@pytest.mark.parametrize(
    ("server", "client", "kind", "words"),
    [
        (
            NOTHING,
            "import no_such_module\n",
            NoWorkers,
            ["cannot be loaded on worker0, worker1", "no_such_module"],
        ),
        (
            "1 / 0\n",
            "app = ClientApp()\n",
            UsageError,
            ["broken.server:app cannot be loaded", "ZeroDivisionError"],
        ),
        (RAISING, "app = ClientApp()\n", JobFailed, ["the ServerApp raised KeyError: 'mine'"]),
        (EXITING, "app = ClientApp()\n", JobFailed, ["process ended with exit code 7"]),
    ],
    ids=["client does not load", "server does not load", "server raises", "server exits"],
)
def test_an_app_that_fails_says_where_and_why(
    fleet, tmp_path: Path, server: str, client: str, kind: type[AtollError], words: list[str]
) -> None:
    app = write_app(tmp_path, "broken", server, client)
    accept(fleet, app)
    error = failure(command(fleet, app, out=str(tmp_path / "out.json")))
    assert isinstance(error, kind)
    assert [word for word in words if word not in str(error)] == []
    eventually(lambda: free(fleet))


# ---------------------------------------------------------------- ends, expected and not

LONG_SERVER = """
def run(grid, context):
    first = said(ask(grid, "train"))
    with open(context.run_config["out"] + ".pids", "w") as file:
        json.dump([r["m"]["pid"] for r in first], file)
    found = [said(ask(grid, "query.hang", timeout=context.run_config["hang"]))]
    found.append(said(ask(grid, "query")))
    return found
"""
LONG_CLIENT = EVERYTHING.replace(
    'weights["w"].numpy() + message.content["arrays"]["w"].numpy()', 'weights["w"].numpy()'
)


def pids(out: Path) -> list[int]:
    found = out.with_name(out.name + ".pids")
    eventually(lambda: found.exists() and found.read_text().endswith("]"))
    return list(json.loads(found.read_text()))


def test_an_interrupt_ends_everything_and_the_next_run_starts_at_once(fleet, tmp_path: Path) -> None:
    app, out = (
        write_app(tmp_path, "long", LONG_SERVER, LONG_CLIENT, "lr = 0.1\nhang = 60.0"),
        tmp_path / "out.json",
    )
    accept(fleet, app)
    with command(fleet, app, 2, out=str(out)) as running:
        events = running.events()
        while next(events)["event"] != "started":
            pass
        children = pids(out)
        assert all(alive(child) for child in children)
        server = running._child.process.pid
    assert not alive(server)
    eventually(lambda: not any(alive(child) for child in children))
    eventually(lambda: free(fleet))
    found, _ = run(fleet, app, out, 2, hang=0.2)
    assert found[0] == []
    assert [r["c"]["partition-id"] for r in found[1]] == [0, 1]


def test_a_serverapp_that_is_killed_ends_its_run_on_the_workers(fleet, tmp_path: Path) -> None:
    app = write_app(tmp_path, "killed", LONG_SERVER, LONG_CLIENT, "lr = 0.1\nhang = 60.0")
    out = tmp_path / "out.json"
    accept(fleet, app)
    with command(fleet, app, 2, out=str(out)) as running:
        events = running.events()
        while next(events)["event"] != "started":
            pass
        children = pids(out)
        os.kill(running._child.process.pid, signal.SIGKILL)
        with pytest.raises(JobFailed, match="SIGKILL"):
            list(events)
    eventually(lambda: not any(alive(child) for child in children))
    eventually(lambda: free(fleet))


def test_a_worker_killed_in_mid_message_gives_an_error_reply_and_leaves_no_orphan(tmp_path: Path) -> None:
    app, out = (
        write_app(tmp_path, "lost", LONG_SERVER, LONG_CLIENT, "lr = 0.1\nhang = 60.0"),
        tmp_path / "out.json",
    )
    with LoopbackFleet(2, options=("--allow-apps",)) as fleet:
        accept(fleet, app)
        with command(fleet, app, 2, out=str(out), hang=3.0) as running:
            for event in running.events():
                if event["event"] == "sent" and event["kind"] == "query.hang":
                    children = pids(out)
                    fleet._processes[2].kill()  # process 0 is the coordinator, worker n is n + 1
        eventually(lambda: not alive(children[1]))
    [lost], after = json.loads(out.read_text())
    assert lost["error"] == 5
    assert "worker1 was lost" in lost["reason"]
    assert [reply["c"]["partition-id"] for reply in after] == [0]


SPAWNER = """
import subprocess
import sys

app = ClientApp()


@app.query("spawn")
def spawn(message, context):
    # One in the app's own session, one in its own, both without a tie to us.
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    made = [subprocess.Popen(command, start_new_session=apart) for apart in (False, True)]
    pids = {"app": os.getpid(), "near": made[0].pid, "apart": made[1].pid}
    return Message(RecordDict({"m": MetricRecord(pids)}), reply_to=message)


@app.query("hang")
def hang(message, context):
    time.sleep(600)
"""


def test_no_process_of_an_app_outlives_a_worker_that_is_killed(tmp_path: Path) -> None:
    server = """
    def run(grid, context):
        [started] = said(ask(grid, "query.spawn"))
        with open(context.run_config["out"] + ".pids", "w") as file:
            json.dump([int(pid) for pid in started["m"].values()], file)
        return said(ask(grid, "query.hang"))
    """
    app, out = write_app(tmp_path, "spawner", server, SPAWNER), tmp_path / "out.json"
    with LoopbackFleet(1, options=("--allow-apps",)) as fleet:
        accept(fleet, app)
        with command(fleet, app, 1, out=str(out)) as running:
            for event in running.events():
                if event["event"] == "sent" and event["kind"] == "query.hang":
                    processes = pids(out)
                    assert all(map(alive, processes))
                    fleet._processes[1].kill()
        eventually(lambda: not any(map(alive, processes)))
    assert [reply["error"] for reply in json.loads(out.read_text())] == [5]


def test_context_state_survives_a_killed_clientapp(fleet, tmp_path: Path) -> None:
    server = """
    def run(grid, context):
        before = said(ask(grid, "train"))
        died = said(ask(grid, "query.die"))
        return [before, died, said(ask(grid, "train"))]
    """
    app = write_app(tmp_path, "surviving", server, LONG_CLIENT, "lr = 0.1")
    before, died, after = run(fleet, app, tmp_path / "out.json", 2)[0]
    assert [r["error"] for r in died] == [8, 8]
    assert [r["m"]["seen"] for r in before] == [1, 1]
    assert [r["m"]["seen"] for r in after] == [2, 2]  # the mod of the fatal call was rolled back
    assert {r["m"]["pid"] for r in before}.isdisjoint(r["m"]["pid"] for r in after)


def test_a_run_goes_on_when_its_coordinator_is_killed_and_started_again(tmp_path: Path) -> None:
    server = """
    import time

    def run(grid, context):
        found = []
        for number in range(4):
            with open(context.run_config["out"] + ".round", "w") as file:
                file.write(str(number))
            time.sleep(0.3)
            replies = ask(grid, "query.large")
            assert all(r.content["a"]["x"].numpy().sum() == 300_000 * number for r in replies)
            found.append(said(ask(grid, "train")))
        return found
    """
    app, out = write_app(tmp_path, "restarted", server, LONG_CLIENT, "lr = 0.1"), tmp_path / "out.json"
    with LoopbackFleet(2, options=("--allow-apps",)) as fleet:
        accept(fleet, app)
        with command(fleet, app, 2, out=str(out)) as running:
            killed = False
            for event in running.events():
                if event["event"] == "sent" and event["kind"] == "query.large" and not killed:
                    killed = True
                    restart_coordinator(fleet)
    found = json.loads(out.read_text())
    assert [[r["m"]["seen"] for r in replies] for replies in found] == [[n, n] for n in (2, 4, 6, 8)]


def test_ctrl_c_ends_the_command_its_serverapp_and_the_clientapps(fleet, tmp_path: Path) -> None:
    app = write_app(tmp_path, "ctrlc", LONG_SERVER, LONG_CLIENT, "lr = 0.1\nhang = 60.0")
    out = tmp_path / "out.json"
    accept(fleet, app)
    arguments = ["flower", "run", str(app), "--nodes", "2", "--json", "--state-dir", str(fleet.state)]
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", *arguments, "--run-config", f'out="{out}"'],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    children = pids(out)
    [server] = [child.pid for child in psutil.Process(process.pid).children()]
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=HUNG_S)
    assert process.returncode == 130, stderr
    events = [json.loads(line)["event"] for line in stdout.splitlines()]
    assert {"nodes", "started", "sent", "replies"} <= set(events)
    assert not alive(server)
    eventually(lambda: not any(alive(child) for child in children))
    eventually(lambda: free(fleet))


def test_a_worker_that_leaves_takes_its_clientapp_along_and_a_frozen_one_is_lost(tmp_path: Path) -> None:
    app = write_app(tmp_path, "leaving", LONG_SERVER, LONG_CLIENT, "lr = 0.1\nhang = 60.0")
    out = tmp_path / "out.json"
    with LoopbackFleet(2, options=("--allow-apps",)) as fleet:
        accept(fleet, app)
        with command(fleet, app, 2, out=str(out)) as running:
            for event in running.events():
                if event["event"] == "sent" and event["kind"] == "query.hang":
                    children = pids(out)
                    fleet._processes[1].send_signal(signal.SIGINT)
                    assert fleet._processes[1].wait(HUNG_S) == 0
                    assert not alive(children[0])
                    fleet._processes[2].send_signal(signal.SIGSTOP)
        fleet._processes[2].kill()
    lost, after = json.loads(out.read_text())
    assert [reply["error"] for reply in lost] == [5, 5]
    # A busy machine may lose them before their message has reached the coordinator.
    for words, reply in zip((["left", "SIGINT"], ["silent"]), lost, strict=True):
        assert any(word in reply["reason"] for word in [*words, "does not take part"])
    assert after == []
