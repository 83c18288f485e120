"""Bytes of a text that are read off the activations at a pipeline's cut, by depth and noise.

Whoever computes the stage behind a cut receives the activations of everybody's text. Here it tries to read
that text: an attacker as honest work allows it, who knows weights of the front part and public text of the
same kind, and keeps what it received. The model is the byte-level GPT of ``examples/gpt.py``, trained with a
fixed seed on the source code of Python's standard library; what is attacked is text that it was not trained
on.

- ``embedding``: the byte whose embedding, with that of its position, is nearest.
- ``mean``: the byte whose mean activation at this depth, over public text, is nearest.
- ``linear``: a linear classifier of activations, fitted to public text (linear discriminant, in closed form).
- ``search``: byte by byte from the left, the one with which the front part gives the nearest activation.

Noise is Gaussian, its deviation relative to that of the activations; beside it stands what it costs the
model's loss. ``known`` is how old the weights are that the attacker has: ``current``, ``earlier`` (of two
thirds of the training, as before a fine-tuning), ``initial``. A search is right or wrong about what stands
behind: errors stay, so it is the best attack with little noise alone.

  python -m benchmarks.reconstruction --seed 0 --json
  python -m benchmarks.reconstruction --plot docs/figures/reconstruction.png

Dims: N windows, T length, D width, V vocabulary, H heads, S head size, P earlier positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll import ByteText
from benchmarks.harness import conclude, execute, machine, parser
from examples.gpt import GPT, VOCABULARY, Block

KNOWN = ("current", "earlier", "initial")
DRIFT = 1.0  # noise that an attacker with older weights allows for: as much as the activations deviate


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes of the model, its training and the attack."""

    width: int = 96
    layers: int = 6
    heads: int = 4
    length: int = 48
    batch: int = 16
    steps: int = 600
    learning_rate: float = 2e-3
    public: int = 1024  # windows of public text that the attacker runs through its copy
    attacked: int = 128  # windows
    searched: int = 16  # of these, as the search takes V forwards a byte
    depths: tuple[int, ...] = (0, 1, 2, 4, 6)  # blocks before the cut
    noises: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Attacker:
    """Attacker's weights of the front part, and public text."""

    module: GPT
    public: Tensor  # [N, T]


Attack = Callable[[Attacker, Tensor, int, float], Tensor]
"""Returns the bytes [N, T] found in activations [N, T, D] after so many blocks, allowing for this noise."""


def front(module: GPT, tokens_NT: Tensor, depth: int) -> Tensor:
    """Return the activations after ``depth`` blocks, [N, T, D]."""
    x_NTD: Tensor = module.bytes(tokens_NT) + module.positions.weight[: tokens_NT.shape[1]]
    for block in module.blocks[:depth]:
        x_NTD = block(x_NTD)
    return x_NTD


def loss_behind(module: GPT, x_NTD: Tensor, tokens_NT: Tensor, depth: int) -> float:
    """Return the model's loss, nats a byte, of activations after ``depth`` blocks."""
    for block in module.blocks[depth:]:
        x_NTD = block(x_NTD)
    logits_NTV: Tensor = module.head(module.norm(x_NTD))
    return float(F.cross_entropy(logits_NTV[:, :-1].reshape(-1, VOCABULARY), tokens_NT[:, 1:].reshape(-1)))


def noisy(x_NTD: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Return activations with Gaussian noise of ``noise`` times their own deviation."""
    found_NTD: Tensor = x_NTD + noise * x_NTD.std() * torch.randn(x_NTD.shape, generator=generator)
    return found_NTD


# ---------------------------------------------------------------- the attacks


def nearest_embedding(attacker: Attacker, seen_NTD: Tensor, depth: int, noise: float) -> Tensor:
    """Return the byte whose embedding with the position's is nearest, [N, T]."""
    positions_TD = attacker.module.positions.weight[: seen_NTD.shape[1]]
    return _distances(seen_NTD - positions_TD, attacker.module.bytes.weight).argmin(-1)


def nearest_mean(attacker: Attacker, seen_NTD: Tensor, depth: int, noise: float) -> Tensor:
    """Return the byte whose mean activation over public text is nearest, [N, T]."""
    public = _moments(attacker, depth)
    distances_NTV = _distances(seen_NTD, public.means)
    return distances_NTV.masked_fill(public.counts == 0, torch.inf).argmin(-1)


def linear(attacker: Attacker, seen_NTD: Tensor, depth: int, noise: float) -> Tensor:
    """Return the likeliest byte if activations of a byte are Gaussian with one covariance for all, [N, T].

    With means m_v, frequencies p_v and covariance C: argmax of x C^-1 m_v - m_v C^-1 m_v / 2 + log p_v.
    Noise is part of that covariance.
    """
    public = _moments(attacker, depth)
    ridge = (noise * public.deviation) ** 2 + 1e-6 * float(public.covariance.trace())
    covariance_DD = public.covariance + ridge * torch.eye(len(public.covariance))
    weights_DV: Tensor = torch.linalg.solve(covariance_DD, public.means.T)
    bias_V = (public.counts / public.counts.sum()).log() - (public.means * weights_DV.T).sum(1) / 2
    return (seen_NTD @ weights_DV + bias_V).argmax(-1)


def search(attacker: Attacker, seen_NTD: Tensor, depth: int, noise: float) -> Tensor:
    """Return the bytes with which the front part gives the nearest activations, one position at a time.

    Activations of a causal model depend on nothing to the right, so each byte is found by V forwards.
    """
    module, (windows, length, _) = attacker.module, seen_NTD.shape
    before: list[tuple[Tensor, Tensor] | None] = [None] * depth  # keys and values of what was found
    found = []
    for position in range(length):
        x_NVD = (module.bytes.weight + module.positions.weight[position]).expand(windows, -1, -1)
        own = []
        for at in range(depth):
            x_NVD, keys_values = _extended(module.blocks[at], x_NVD, before[at])  # type: ignore[arg-type]
            own.append(keys_values)
        byte_N = (x_NVD - seen_NTD[:, position, None]).square().sum(-1).argmin(-1)
        found.append(byte_N)
        for at, (k_NHVS, v_NHVS) in enumerate(own):
            pick = byte_N[:, None, None, None].expand(-1, k_NHVS.shape[1], 1, k_NHVS.shape[3])
            new = k_NHVS.gather(2, pick), v_NHVS.gather(2, pick)
            past = before[at]
            before[at] = (
                new if past is None else (torch.cat((past[0], new[0]), 2), torch.cat((past[1], new[1]), 2))
            )
    return torch.stack(found, 1)


ATTACKS: dict[str, Attack] = {
    "embedding": nearest_embedding,
    "mean": nearest_mean,
    "linear": linear,
    "search": search,
}


def _distances(x_NTD: Tensor, rows_VD: Tensor) -> Tensor:
    """Euclidean distances [N, T, V], exact where they are small."""
    return torch.cdist(x_NTD, rows_VD[None], compute_mode="donot_use_mm_for_euclid_dist")


class _Moments(NamedTuple):
    """Activations of public text: mean and count of each byte, covariance within bytes, deviation of all."""

    means: Tensor  # [V, D]
    counts: Tensor  # [V]
    covariance: Tensor  # [D, D]
    deviation: float


def _moments(attacker: Attacker, depth: int) -> _Moments:
    x_KD = front(attacker.module, attacker.public, depth).flatten(0, 1)
    bytes_K = attacker.public.flatten()
    counts_V = torch.bincount(bytes_K, minlength=VOCABULARY)
    sums_VD = torch.zeros(VOCABULARY, x_KD.shape[1]).index_add_(0, bytes_K, x_KD)
    means_VD = sums_VD / counts_V.clamp(min=1)[:, None]
    rest_KD = x_KD - means_VD[bytes_K]
    return _Moments(means_VD, counts_V, rest_KD.T @ rest_KD / len(rest_KD), float(x_KD.std()))


def _extended(
    block: Block, x_NVD: Tensor, past: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return what a block gives for V candidates of the next position, and their keys and values
    [N, H, V, S], behind those of the positions before [N, H, P, S]."""
    windows, candidates, width = x_NVD.shape
    q, k, v = block.qkv(block.norm_1(x_NVD)).split(width, dim=2)
    shape = (windows, candidates, block.heads, width // block.heads)
    q_NHVS, k_NHVS, v_NHVS = (part.view(shape).transpose(1, 2) for part in (q, k, v))
    scores_NHVP = (q_NHVS * k_NHVS).sum(-1, keepdim=True)  # a candidate sees itself ...
    if past is not None:
        scores_NHVP = torch.cat((q_NHVS @ past[0].transpose(2, 3), scores_NHVP), -1)  # ... and all before
    shares_NHVP = (scores_NHVP / q_NHVS.shape[-1] ** 0.5).softmax(-1)
    attended_NHVS = shares_NHVP[..., -1:] * v_NHVS
    if past is not None:
        attended_NHVS = attended_NHVS + shares_NHVP[..., :-1] @ past[1]
    x_NVD = x_NVD + block.out(attended_NHVS.transpose(1, 2).reshape(windows, candidates, width))
    x_NVD = x_NVD + block.down(F.gelu(block.up(block.norm_2(x_NVD))))
    return x_NVD, (k_NHVS, v_NHVS)


# ---------------------------------------------------------------- the model and its text


def texts(setup: Setup, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of public text, and of text that nobody trains on."""
    source = ByteText(length=setup.length, input="tokens", max_bytes=4_000_000, seed=seed)
    public, private = source.materialise(1)
    assert private is not None
    return public.arrays["text"], private.arrays["text"]


def entropy(text: np.ndarray) -> float:
    """Return the entropy of a text's single bytes, nats: the loss of a model that knows no context."""
    counts = np.bincount(text, minlength=VOCABULARY)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def windows(text: np.ndarray, count: int, length: int, draw: np.random.Generator) -> Tensor:
    """Return ``count`` windows of a text at random places, [N, T]."""
    starts = draw.integers(0, len(text) - length, count)
    return torch.from_numpy(np.stack([text[start : start + length] for start in starts])).long()


def trained(setup: Setup, text: np.ndarray, seed: int) -> dict[str, GPT]:
    """Return the model as it is after training, after two thirds of it, and before (``KNOWN``)."""
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    module = GPT(setup.width, setup.layers, setup.heads, setup.length)
    optimizer = torch.optim.AdamW(module.parameters(), setup.learning_rate, betas=(0.9, 0.95))
    found = {"initial": copy.deepcopy(module)}
    for step in range(setup.steps):
        if step == setup.steps * 2 // 3:
            found["earlier"] = copy.deepcopy(module)
        loss = module(windows(text, setup.batch, setup.length, draw))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return {**found, "current": module}


@torch.no_grad()
def attacked(setup: Setup, seed: int) -> dict[str, Any]:
    """Train the model, attack it at every depth, and return the shares of bytes that were found."""
    public, private = texts(setup, seed)
    with torch.enable_grad():
        models = trained(setup, public, seed)
    draw = np.random.default_rng(seed + 1)
    public_NT = windows(public, setup.public, setup.length, draw)
    secret_NT = windows(private, setup.attacked, setup.length, draw)
    victim = models["current"]
    attackers = {known: Attacker(models[known], public_NT) for known in KNOWN}
    rows = []
    for depth in setup.depths:
        clean_NTD = front(victim, secret_NT, depth)
        for noise in setup.noises:
            seen_NTD = noisy(clean_NTD, noise, torch.Generator().manual_seed(seed))
            facts = {"depth": depth, "noise": noise, "loss": loss_behind(victim, seen_NTD, secret_NT, depth)}
            for known in KNOWN if noise == 0.0 else KNOWN[:1]:
                allowed = noise if known == "current" else max(noise, DRIFT)
                shares = shares_found(setup, attackers[known], seen_NTD, secret_NT, depth, allowed)
                rows.append({**facts, "known": known, **shares})
                print(_line(rows[-1]), flush=True)
    commonest = int(torch.bincount(public_NT.flatten()).argmax())
    return {
        "rows": rows,
        "guess": float((secret_NT == commonest).float().mean()),
        "unigram": entropy(private),
        "loss": loss_behind(victim, front(victim, secret_NT, 0), secret_NT, 0),
        "depth0": _share(rows, 0, 0.0, "embedding"),
        "deepest": setup.depths[-1],
        "deepest_linear": _share(rows, setup.depths[-1], 0.0, "linear"),
        "deepest_search": _share(rows, setup.depths[-1], 0.0, "search"),
        "deepest_noisy": max(_share(rows, setup.depths[-1], setup.noises[-1], name) for name in ATTACKS),
    }


def shares_found(
    setup: Setup, attacker: Attacker, seen_NTD: Tensor, secret_NT: Tensor, depth: int, noise: float
) -> dict[str, float]:
    """Return by attack the share of the bytes that it finds; ``noise``: what the attacker allows for."""
    found = {}
    for name, attack in ATTACKS.items():
        count = setup.searched if name == "search" else len(seen_NTD)
        guessed_NT = attack(attacker, seen_NTD[:count], depth, noise)
        found[name] = float((guessed_NT == secret_NT[:count]).float().mean())
    return found


def _share(rows: Sequence[Mapping[str, Any]], depth: int, noise: float, attack: str) -> float:
    """The share that an attack with the current weights finds."""
    same = (r for r in rows if (r["depth"], r["noise"], r["known"]) == (depth, noise, "current"))
    return float(next(same)[attack])


def _line(row: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{name} {row[name]:.1%}" for name in ATTACKS)
    return f"depth {row['depth']}, noise {row['noise']:g}, {row['known']}: {shares}; loss {row['loss']:.3f}"


def plot(setup: Setup, found: Mapping[str, Any], path: Path) -> None:
    """Draw the shares found by noise, one panel a depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(setup.depths), 2.8), layout="constrained")
    panels = figure.subplots(1, len(setup.depths), sharey=True)
    for panel, depth in zip(panels, setup.depths, strict=True):
        for name in ATTACKS:
            shares = [100.0 * _share(found["rows"], depth, noise, name) for noise in setup.noises]
            panel.plot(range(len(setup.noises)), shares, marker="o", markersize=3, label=name)
        panel.axhline(100.0 * found["guess"], color="grey", linewidth=0.8, linestyle=":")
        panel.set_xticks(range(len(setup.noises)), [f"{noise:g}" for noise in setup.noises])
        panel.set_title(f"after {depth} blocks", fontsize=9)
        panel.set_xlabel("noise / deviation of activations", fontsize=8)
    panels[0].set_ylabel("bytes found, %")
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Print a line a depth and noise and, with --json, one object."""
    options = parser(__doc__)
    options.add_argument("--plot", type=Path, help="write the picture there")
    args = options.parse_args()
    setup = Setup()
    found = attacked(setup, args.seed)
    print(
        f"guessing the commonest byte finds {found['guess']:.1%}; loss {found['loss']:.3f} nats a byte, "
        f"{found['unigram']:.3f} for single bytes"
    )
    print(f"machine {machine()}, seed {args.seed}")
    if args.plot:
        plot(setup, found, args.plot)
    return conclude({"seed": args.seed, **found}, args.json)


if __name__ == "__main__":
    execute(main)
