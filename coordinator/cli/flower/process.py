"""The process of a detached run: what `atoll flower run` or `simulate` do, without a terminal.

Started by ``coordinator.flower.detached`` with the run's folder; what to run is on standard input.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from atoll.errors import AtollError, UsageError
from coordinator.cli.flower.follow import local_nodes, run_app
from coordinator.cli.flower.runs import outcome
from coordinator.cli.processes import ended_by_signals
from coordinator.client.endpoint import Endpoint
from coordinator.flower.detached import Keeper, RunFolder
from coordinator.flower.launcher import Wish
from hostos import leaving
from hostos.command_line import err
from protos.app_bundle import make_bundle
from protos.credentials import JoinToken


def perform(folder: RunFolder, setup: dict[str, Any], keeper: Keeper) -> None:
    """Run what the setup says to its end. Raises what ended it."""
    record = folder.read()
    app = Path(record.folder)
    bundle = make_bundle(app)
    if bundle.hash != record.hash:
        raise UsageError(f"files of {app} changed while they were read; try again")
    signer, signature = (bytes.fromhex(part) for part in setup["signed"])
    wish = Wish(app, bundle, setup["config"], setup["nodes"], setup["wait_s"], setup["show_log"])
    wish = replace(wish, signed=(signer, signature), run=int(record.run, 16), packages=setup["packages"])
    if setup["endpoint"] is None:
        with local_nodes(wish, setup["workers"]) as (endpoint, here, joined):
            run_app(endpoint, here, json=False, heard=keeper.heard, joined=joined)
        return
    facts = setup["endpoint"]
    token = JoinToken.decode(facts["token"]) if facts["token"] else None
    endpoint = Endpoint(facts["host"], facts["port"], token, facts["use_proxy"])
    run_app(endpoint, wish, json=False, heard=keeper.heard)


def main() -> NoReturn:
    """Entry: the run's folder is the only argument."""
    folder = RunFolder(Path(sys.argv[1]))
    ended: BaseException | None = None
    with Keeper(folder) as keeper:
        try:
            with ended_by_signals():
                perform(folder, json.loads(sys.stdin.buffer.read()), keeper)
        except AtollError as error:
            ended = error
            err.print("error:", str(error))
        except (KeyboardInterrupt, SystemExit) as error:
            ended = error
            err.print("stopped")
        except Exception as error:  # noqa: BLE001 - nobody else would see it
            ended = error
            traceback.print_exc()
        stage, code, reason = outcome(ended)
        keeper.ended(stage, code, reason)
    leaving.leave(code)


if __name__ == "__main__":
    main()
