"""Peers of gossip rounds chosen for mixing per second, against random pairs and SAPS-PSGD's published rule.

    python -m benchmarks.peer_selection [--seed N] [--json] [--small]

A round of pairs lasts as long as its slowest pair needs for one unit; `bottleneck` is the harmonic mean of
that pair's rate over rounds, `mixing` -ln(contraction of the disagreement) a second. Each method selects 300
rounds on the same drawn rates; one run is one seed.

- `uniform`, 32 peers: rates of both directions uniform(0, 5), as in the SAPS paper; medians over matrices.
- `homes`, 24 peers: uplinks of 1 to 20 on two continents, 0.5 to 5 between them.
- `drawn`: 50 matrices of five kinds and 6 to 40 peers; median mixing of 5 runs, over random's.
- `drawn_masked`: the same where a round averages a hundredth of the elements, as SAPS does.
- `windows`: seeds with an unconnected window of rounds, 24 to 32 peers, thresholds drawn.
- `large`: 500 peers: seconds of the search and of the slowest round.

SAPS (papers/compression.md 2.2): a blossom with random weights on pairs faster than the median while the
pairs of the last T rounds connect all peers, else on pairs that have not met within T; who is left over is
matched with anybody. ``--small`` draws fewer of all, for a look.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

from benchmarks.harness import conclude, execute, parser
from coordinator.planning import TUNED
from coordinator.planning.peers.selection import best_threshold, simulate
from strategies.exchanges.matching import Network, Pairs
from tests.inprocess.pairs import drawn_pairs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ROUNDS = 300
RUNS = 5
MASKED = 0.01  # of the elements a round: SAPS at c = 100
SAPS_WINDOWS = (3, 10)  # the published default, and what mixes 32 peers
NEVER = -(10**6)  # the last meeting of peers that have not met

Select = Callable[[int], Pairs]


# ---------------------------------------------------------------- rates


def uniform(n: int, draw: np.random.Generator) -> Floats:
    """Both directions of every pair uniform(0, 5)."""
    return draw.uniform(0.0, 5.0, (n, n))


def homes(n: int, draw: np.random.Generator) -> Floats:
    """Homes on two continents: a pair gets the sender's uplink, less between continents."""
    uplink = np.exp(draw.uniform(0.0, np.log(20.0), n))
    rates = uplink[:, None] * np.exp(draw.normal(0.0, 0.2, (n, n)))
    between = np.exp(draw.uniform(np.log(0.5), np.log(5.0), (n, n)))
    continent = np.arange(n) % 2
    return np.where(continent[:, None] == continent[None, :], rates, np.minimum(rates, between))


def lognormal(n: int, draw: np.random.Generator) -> Floats:
    """Rates over three orders of magnitude."""
    return np.exp(draw.normal(0.0, 1.5, (n, n)))


def sites(n: int, draw: np.random.Generator) -> Floats:
    """Sites of four machines on a local network, uniform rates between sites."""
    site = np.arange(n) // 4
    return np.where(site[:, None] == site[None, :], 1000.0, draw.uniform(1.0, 5.0, (n, n)))


def stragglers(n: int, draw: np.random.Generator) -> Floats:
    """Nearly equal links, and two peers at a twentieth."""
    rates = draw.uniform(4.0, 5.0, (n, n))
    rates[:2] /= 20.0
    return rates


KINDS: dict[str, Callable[[int, np.random.Generator], Floats]] = {
    kind.__name__: kind for kind in (uniform, homes, lognormal, sites, stragglers)
}


# ---------------------------------------------------------------- what selects


def ours(rates: Floats, seed: int, share: float = 1.0) -> Select:
    """The product's selection, with its search."""
    network = Network.of(rates)
    return drawn_pairs(Network(network.rate, best_threshold(network, seed, share)), seed)


def at_random(n: int, seed: int) -> Select:
    """A random matching of all peers."""

    def select(number: int) -> Pairs:
        order = np.random.default_rng([seed, number]).permutation(n).tolist()
        return tuple(zip(order[: n // 2], order[n // 2 : n // 2 * 2], strict=True))

    return select


def saps(network: Network, seed: int, window: int) -> Select:
    """SAPS-PSGD's rule with T_thres = ``window`` and B_thres = the median rate; rounds in order."""
    n = network.n
    draw = np.random.default_rng(seed)
    fast = network.rate > np.median(network.rate[np.triu_indices(n, 1)])
    everybody = ~np.eye(n, dtype=np.bool_)
    met = np.full((n, n), NEVER)

    def select(number: int) -> Pairs:
        recent = met > number - window
        candidates = fast if nx.is_connected(nx.from_numpy_array(recent)) else everybody & ~recent
        pairs = _blossom(candidates, draw)
        left = np.ones(n, dtype=np.bool_)
        left[[peer for pair in pairs for peer in pair]] = False
        pairs += _blossom(everybody & left[:, None] & left[None, :], draw)
        for i, j in pairs:
            met[i, j] = met[j, i] = number
        return pairs

    return select


def _blossom(candidates: NDArray[np.bool_], draw: np.random.Generator) -> Pairs:
    graph = nx.Graph()
    edges = np.argwhere(np.triu(candidates, 1)).tolist()
    weights = draw.integers(1, 2**30, len(edges)).tolist()
    graph.add_weighted_edges_from((i, j, weight) for (i, j), weight in zip(edges, weights, strict=True))
    return tuple(nx.max_weight_matching(graph, maxcardinality=True))


# ---------------------------------------------------------------- figures


def compare(kind: str, n: int, matrices: int, seed: int) -> dict[str, Any]:
    """Medians over drawn matrices of every method's mixing and bottleneck, and of ours over each."""
    figures: dict[str, list[tuple[float, float]]] = {}
    for number in range(matrices):
        rates = KINDS[kind](n, np.random.default_rng([seed, number]))
        network = Network.of(rates)
        methods = {"atoll": ours(rates, number), "random": at_random(n, number)}
        methods |= {f"saps_{window}": saps(network, number, window) for window in SAPS_WINDOWS}
        for name, select in methods.items():
            mixing = simulate(network, select, ROUNDS, number)
            figures.setdefault(name, []).append((mixing.per_second, mixing.bottleneck))
    result: dict[str, Any] = {}
    for name, found in figures.items():
        columns = list(zip(*found, strict=True))
        over = [[mine[i] / its[i] for mine, its in zip(figures["atoll"], found, strict=True)] for i in (0, 1)]
        result[name] = {
            "mixing": round(statistics.median(columns[0]), 4),
            "bottleneck": round(statistics.median(columns[1]), 4),
            "atoll_over_it_mixing": _spread(over[0]),
            "atoll_over_it_bottleneck": _spread(over[1]),
        }
        print(f"{kind:8} {n} peers, {name:8} {result[name]}", flush=True)
    return result


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"least": round(min(ratios), 2), "median": round(statistics.median(ratios), 2)}


def drawn(matrices: int, seed: int, share: float) -> dict[str, Any]:
    """Median mixing of ``RUNS`` runs over random's, on matrices of all kinds, of a ``share`` of elements."""
    ratios: list[float] = []
    names: list[str] = []
    for number in range(matrices):
        kind = list(KINDS)[number % len(KINDS)]
        draw = np.random.default_rng([seed, 1, number])
        n = int(draw.integers(6, 41))
        rates = KINDS[kind](n, draw)
        network = Network.of(rates)
        runs = range(seed, seed + RUNS)
        mine = [simulate(network, ours(rates, run, share), ROUNDS, run, share).per_second for run in runs]
        random = [simulate(network, at_random(n, run), ROUNDS, run, share).per_second for run in runs]
        ratios.append(statistics.median(mine) / statistics.median(random))
        names.append(kind)
    by_kind = {kind: _spread([r for r, k in zip(ratios, names, strict=True) if k == kind]) for kind in KINDS}
    print(
        f"drawn    {matrices} matrices, share {share:g}: mixing over random's {_spread(ratios)}, {by_kind}",
        flush=True,
    )
    return {"matrices": matrices, **_spread(ratios), "kinds": by_kind}


def windows(seeds: int, seed: int) -> dict[str, Any]:
    """Seeds whose rounds have an unconnected window, and those on which a peer idles twice running."""
    torn, idle_twice = 0, 0
    for number in range(seed, seed + seeds):
        draw = np.random.default_rng(number)
        n = int(draw.integers(24, 33))
        known = Network.of(uniform(n, draw)).rate
        threshold = float(np.quantile(known[known > 0.0], draw.choice(TUNED.quantiles)))
        network = Network(known, threshold)
        select = drawn_pairs(network, number)
        met = np.zeros((ROUNDS // 5, n, n), dtype=np.bool_)
        idle = np.ones((len(met), n), dtype=np.bool_)
        for at in range(len(met)):
            for i, j in select(at):
                met[at, i, j] = True
                idle[at, [i, j]] = False
        idle_twice += bool((idle[1:] & idle[:-1]).any())
        span = network.window
        torn += not all(
            nx.is_connected(nx.from_numpy_array(met[first : first + span].any(axis=0)))
            for first in range(len(met) - span + 1)
        )
    print(f"windows  {seeds} seeds: {torn} with an unconnected window, {idle_twice} idle twice", flush=True)
    return {"seeds": seeds, "unconnected": torn, "idle_twice": idle_twice}


def large(n: int, seed: int) -> dict[str, Any]:
    """Seconds of the search and of rounds, and mixing over random's, by kind."""
    result: dict[str, Any] = {}
    for kind in ("uniform", "homes"):
        rates = KINDS[kind](n, np.random.default_rng([seed, 2]))
        network = Network.of(rates)
        begin = time.perf_counter()
        chosen = ours(rates, seed)
        searched = time.perf_counter() - begin
        round_s = []
        for number in range(ROUNDS // 3):
            begin = time.perf_counter()
            chosen(number)
            round_s.append(time.perf_counter() - begin)
        mine = simulate(network, chosen, ROUNDS // 3, seed)
        random = simulate(network, at_random(n, seed), ROUNDS // 3, seed)
        result[kind] = {
            "search_s": round(searched, 2),
            "slowest_round_s": round(max(round_s), 4),
            "round_s": round(statistics.median(round_s), 4),
            "mixing_over_random": round(mine.per_second / random.per_second, 1),
        }
        print(f"large    {n} peers, {kind}: {result[kind]}", flush=True)
    return result


def main() -> int:
    """Run all cases; the exit code is 1 where a window is unconnected or a peer idles twice running."""
    options = parser(__doc__)
    options.add_argument("--small", action="store_true", help="fewer matrices and seeds")
    args = options.parse_args()
    fewer = 10 if args.small else 1
    figures = {
        "uniform": compare("uniform", 32, 10 // fewer, args.seed),
        "homes": compare("homes", 24, 10 // fewer, args.seed),
        "drawn": drawn(50 // fewer, args.seed, 1.0),
        "drawn_masked": drawn(50 // fewer, args.seed, MASKED),
        "windows": windows(1000 // fewer, args.seed),
        "large": large(500 // fewer, args.seed),
    }
    broken = figures["windows"]["unconnected"] + figures["windows"]["idle_twice"]
    wrong = f"{broken} seeds break a promise of selection" if broken else ""
    return conclude(figures, args.json, wrong)


if __name__ == "__main__":
    execute(main)
