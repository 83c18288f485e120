"""Hash the packets of every codec over seeded tensors, and compare them with a commit's.

    python -m benchmarks.packet_hashes --against 9125213 --json

``--against`` runs this file on the commit's ``compressors`` and ``atoll``, on the same machine. Prints every
codec and ratio whose headers, payloads or decoded tensors differ; then it ends with 1.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from atoll.opdag import TensorMeta
from benchmarks.harness import conclude, execute, parser
from compressors import CODECS, make_compressor

ROOT = Path(__file__).resolve().parents[1]
RATIOS = (2.0, 8.0, 60.0, 300.0)
SHAPES = ((5,), (64,), (96, 512), (3, 50_001), (257, 1000))
DTYPES = ("float32", "bfloat16", "float16")


def tensors(seed: int) -> Iterator[torch.Tensor]:
    """Yield Gaussian, heavy-tailed, mostly zero, tied and clustered values of every shape and dtype."""
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        clustered = x.clone()
        clustered.view(-1)[: x.numel() // 10] *= 20
        for kind in (x, x**5, x * (x.abs() > 1.5), x.sign() * x.abs().round(), clustered):
            for dtype in DTYPES:
                yield kind.to(getattr(torch, dtype))


def hashed(name: str, ratio: float, seed: int) -> str:
    """Return the hash of two packets of each tensor and of what they decode to.

    The second packet is made with the first one's state.
    """
    codec, found = make_compressor(name, ratio), hashlib.sha256()
    for tensor in tensors(seed):
        state = codec.init(TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        for step in range(2):
            packet, state = codec.compress(tensor, state, seed=step)
            found.update(packet.header + bytes(packet.payload))
            if not CODECS[name].shared_state:
                found.update(
                    codec.decompress(packet).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
    return found.hexdigest()[:16]


def every(seed: int) -> dict[str, str]:
    """Return the hash of every codec and ratio."""
    cases = [(n, ratio) for n, facts in CODECS.items() for ratio in (RATIOS if facts.rated else (1.0,))]
    return {f"{name}:{ratio:g}": hashed(name, ratio, seed) for name, ratio in cases}


def of_commit(commit: str, seed: int) -> dict[str, str]:
    """Return the hashes of a commit's codecs. CalledProcessError when git does not know it."""
    packed = subprocess.run(
        ["git", "archive", commit, "compressors", "atoll"], cwd=ROOT, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((folder, str(ROOT)))}
        command = [sys.executable, "-P", "-m", "benchmarks.packet_hashes", "--json", "--seed", str(seed)]
        ran = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Print the hashes, or what differs from the commit's."""
    options = parser(__doc__)
    options.add_argument("--against", metavar="COMMIT", help="compare with this commit's codecs")
    given = options.parse_args()
    torch.set_num_threads(1)
    found = every(given.seed)
    if given.against is None:
        print("\n".join(f"{case:24} {digest}" for case, digest in found.items()))
        return conclude(found, given.json)
    before = of_commit(given.against, given.seed)
    other = sorted(case for case in found.keys() & before.keys() if found[case] != before[case])
    gone, new = sorted(before.keys() - found.keys()), sorted(found.keys() - before.keys())
    print(f"{len(found)} codecs and ratios against {given.against}: {len(other)} differ, {len(gone)} gone")
    figures = {"against": given.against, "compared": len(found), "differ": other, "gone": gone, "new": new}
    return conclude(figures, given.json, ", ".join(other + gone))


if __name__ == "__main__":
    execute(main)
