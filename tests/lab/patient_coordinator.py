"""`atoll`, whose coordinator gives a silent worker up late: for tests that are not about patience."""

from dataclasses import replace
from typing import Any

from coordinator import server
from coordinator.cli.main import main
from coordinator.config import Liveness

if __name__ == "__main__":
    serve_forever = server.serve_forever

    def patient(config: Any, announce: Any) -> None:
        serve_forever(replace(config, liveness=Liveness(suspect_after_s=50.0, dead_after_s=60.0)), announce)

    server.serve_forever = patient
    main()
