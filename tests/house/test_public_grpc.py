"""gRPC's public API is all that the product uses of it, so any release of its major version will do."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("atoll", "compressors", "coordinator", "hostos", "protos", "strategies", "worker")
GENERATED = "_pb2_grpc.py"  # gRPC's own generator writes a check of its version there
PRIVATE = re.compile(r"grpc(?:\.\w+)*\._\w|cygrpc|from grpc(?:\.\w+)* import _|GRPC_EXPERIMENTS")


def found(source: str) -> list[str]:
    return [match.group() for match in PRIVATE.finditer(source)]


@pytest.mark.parametrize("package", PRODUCT)
def test_no_private_part_of_grpc_is_used(package: str) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if not path.name.endswith(GENERATED)]
    wrong = {str(path.relative_to(ROOT)): names for path in files if (names := found(path.read_text()))}
    assert files
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "import grpc._common",
        "from grpc._cython import cygrpc",
        "from grpc import _channel",
        "grpc.aio._call.Call",
        'os.environ.setdefault("GRPC_EXPERIMENTS", "")',
    ],
)
def test_private_parts_are_recognised(source: str) -> None:
    assert found(source)
    assert not found("import grpc\nimport grpc.aio\ngrpc.aio.server()\nself._grpc_call = grpc_errors._named")


def test_grpc_is_bounded_by_its_next_major_version_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = [name for name in project["dependencies"] if re.match(r"grpcio\b(?!-)", name)]
    assert re.fullmatch(r"grpcio>=1\.\d+,<2", bound)
