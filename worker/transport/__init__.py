"""Transport: bytes between workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tunables:
    """Numbers that tune this wing, found in the lab where no line names a source, and what each trades."""

    # Of the time from sending to acknowledgement, which counts as busy: a round trip estimated too long must
    # not leave nothing. It also bounds what a message far shorter than the round trip can show.
    least_busy_share: float = 0.1
    quickest_quantile: float = 0.25  # of the bytes, the quickest bursts first; fewer might be the clocks
    spare_ping_s: float = 15.0  # where nothing need show that the peer lives: keeps routers' mappings
    together_bytes: int = 32 << 10  # in one message: fewer messages, a longer wait for an urgent one
    # Behind a longer round trip a peer gets so many connections, half of them for each end's data. One TCP
    # flow carries at most 1.22 * MSS / (RTT * sqrt(loss)) (papers/peers.md 7.4); gRPC does not show losses.
    far_rtt_s: float = 0.008
    far_streams: int = 8
    measured_piece_bytes: int = 8 << 20  # of a rate's measurement: longer than a window, shorter than a step
    echoes: int = 10  # whose quickest is the round trip
    echo_timeout_s: float = 5.0
    first_backoff_s: float = 0.02  # before a peer is dialled again: how soon, against a peer that is flooded
    max_backoff_s: float = 2.0
    reversed_after_s: float = 1.0  # for the end that is to dial; then the other dials as well
    dial_back_after_s: float = 0.2  # the same where a connection broke
    greet_within_s: float = 5.0  # from dialling a relay to its greeting
    accept_within_s: float = 10.0  # from a tunnel's stream to gRPC's connection over it
    idle_connection_s: float = 30.0  # without a stream: a handshake saved, a descriptor taken
    close_within_s: float = 5.0  # of the network, and of the loop that it stands on
    slack_s: float = 0.050  # of queue beyond a full link: goodput when the link is uneven, against what waits
    first_window_bytes: int = 256 << 10
    least_window_bytes: int = 32 << 10
    quiet_share: float = 0.25  # of the slack and the first window, for what can wait
    chunks_a_window: int = 8  # an urgent message waits for a chunk that is being written
    probe_rounds: int = 8  # of windows, of which one looks for more rate with twice the slack
    rate_horizon_s: float = 2.0
    rtt_horizon_s: float = 600.0  # long: a full link's round trip shows its queue, each horizon adds it
    clock_horizon_s: float = 60.0  # in which two clocks drift apart by a few milliseconds
    late_acks: int = 16  # in their mean: by the largest both ends would take turns to send a whole window


TUNED = Tunables()
