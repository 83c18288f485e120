"""Planning: a graph and a fleet become a plan. Pure; imports nothing above it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tunables:
    """Numbers that tune the search: most trade seconds of planning for seconds of a step.

    Shares and factors have no unit. What costs were measured stands beside their formulas, in ``costs/``.
    """

    # Groups of devices, and cuts.
    exact_nodes: int = 12  # an exact order of groups up to here: factorial beyond
    dense_nodes: int = 64  # all links count up to here; of larger fleets
    neighbours: int = 24  # fastest links a device: Louvain is linear in the edges
    bandwidth_gap: float = 1.5  # a gap in sorted bandwidths smaller than this factor separates nothing
    balance_slack: float = 0.10  # nobody balances by cutting through the middle of an attention
    ceilings: tuple[float, ...] = (
        1.0,
        1.1,
        1.3,
        1.7,
        3.0,
    )  # of the min-max: a smaller sum for a larger maximum
    sets_each: int = 8  # of devices, of every size, whose best order is cut
    thin_place: float = 0.25  # of the median bytes at a boundary: pinned ops reach for what is narrower
    ring_rest: float = 0.01  # of the compute: less than that at an end goes to the piece there
    spares: int = 4  # unused devices tried in place of a used one
    cut_tolerance: float = 1e-3  # of threshold cuts
    fence_share: float = 0.10  # of the compute, either way from the optimum, in which a cheaper cut is sought
    improves: float = 1.05  # times what it would need: no local improvement is expected of who takes longer
    left_out_one_by_one: int = 8  # devices of a plan, the slowest
    # Devices of a huge fleet that are looked at at all.
    seeds: int = 16  # pipelines grown
    fastest: int = 4  # devices that are always chosen, for what they do alone, ...
    largest: int = 2  # ... and with the most memory, for what must stay together
    orders: int = 4  # grown pipelines that the search begins with
    spare_devices: float = 1.5  # taken of a grown pipeline, over those that it is best with
    typical_cut: float = 0.25  # quantile of the bytes at all cuts: the search prefers cheap ones
    short_cost_steps: float = 10.0  # of lacking all the memory
    memory_room: float = 1.25  # of the chosen over what the model needs: no cut fills every device
    # Candidates, and what they must gain over simpler ones.
    finalists: int = 4  # dense ones that are judged compressed, compressed ones whose codecs are settled
    judgements: int = 60  # timeline runs to settle the codecs of one of them
    repeating_gains: float = (
        0.9  # of the step: hooks, which the estimate leaves out, take 3 to 5 % on slow hosts
    )
    deferring_gains: float = 0.97  # of the step, for its memory and what is not predicted
    fill_share: float = 0.05  # of the step that filling and emptying the pipeline's links may add
    compressed_is_worth: float = 0.99  # of the dense step, or nothing is compressed
    near_fastest: float = 1.02  # of the fastest found: a milder choice within this is preferred
    eased_slows: float = 1.003  # of the step before any pair is eased
    taus: int = 8  # between the slowest link's dense time and the limit
    # From every element in four to three bits, to the largest alone (decision 010): at 10 times both cost
    # about the same, at 12 the few bits of several links cost more.
    fine_ratios: tuple[float, ...] = (8.0, 11.0)
    enough: float = 0.95  # of tau: the ratio that follows from the times alone is near enough
    # Replicas and peers.
    most_replicas: int = 8
    share_rounds: int = 3  # of shares of the blocks after the replicas' predicted speed
    # Times a flat exchange's step, up to which the exchange within sites comes first: whether links between
    # sites share an uplink is not always known, and it sends less over them.
    nearly: float = 1.01
    # Times the bytes that the model takes, at which a group of machines that hold it together is complete.
    group_rooms: tuple[float, ...] = (1.25, 2.5)
    group_counts: int = 8  # numbers of peers of several machines that are looked at
    group_starts: int = 24  # ways to group machines that are improved, by ...
    group_sketches: int = 1500  # ... so many sketches in all, of ways with a machine moved
    group_attempts: int = (
        24  # ways whose peers are planned, of which those fall out that have too little memory
    )
    grouped: int = 6  # ways that are planned in full, ...
    planned_peers: int = (
        32  # ... or so many machines in all of them: planning a peer takes a tenth of a second
    )
    grouped_gains: float = 0.9  # ... and what one must take of the step of peers that are one machine each
    round_share: float = 0.25  # of a period's computing that a round may last
    least_deadline_s: float = 60.0  # or a period: the others go on without who is later
    quantiles: tuple[float, ...] = (
        0.0,
        0.2,
        0.4,
        0.6,
        0.7,
        0.8,
        0.9,
        0.96,
    )  # of pairs' rates; 0: no threshold
    simulated_rounds: int = 100
    vectors: int = 8  # whose disagreement a simulation follows
    seen_rounds: int = 10  # of gossip, whose bytes are counted: everybody's turn is among them
    rate_moved: float = 0.2  # share by which a rate must move to count as another
    compared: int = 4  # plans of one machine fewer, with that one as a standby
    # Explanations.
    better: float = (
        0.9  # of its time or load, of one device or link at a time: what gains most bounds the step
    )
    tried_of_a_kind: int = 4
    explained_devices: int = 8  # that are left out, asked about one by one
    left_out_positions: int = 48
    listed: int = 64  # reasons in a plan; of a larger fleet the others are counted
    # Machines up to which every count of replicas is planned, each for itself, as each takes seconds; ...
    every_count: int = 16
    likely_ways: int = 1  # ... beyond, so many ways of replicas, by a sketch, ...
    sketched_apart: float = 3.0  # ... which may be wrong by such a factor against one pipeline; ...
    cut_moves: int = 40  # ... and a part's cut for one share is improved by so many moves for another
    grouped_alike: float = 1.05  # times the best sketch, at which peers that are planned already are taken
    # The same machines with other workers: a site as one per card, cards that are joined fast as a site.
    other_reading: float = 0.9  # of the step, which is worth starting workers anew
    near_bps: float = 8e9  # of links of cards that may be one site: of a machine or a cluster, ...
    near_s: float = 1e-3  # ... and their delay
    read_kinds: int = 3  # kinds of sites up to which each is read by itself, beside all of them
    read_workers: int = 12  # of a reading up to which it is planned, as 16 unlike ones take minutes


TUNED = Tunables()
