"""Hosting: starts the process that computes, contained, bounds its memory and says how it ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tunables:
    """Numbers that tune this wing: unit in the name or beside it, and what each trades."""

    # The compute process: how soon its end is seen, against what a slow machine is allowed.
    ready_s: float = (
        300.0  # from its start: importing torch takes 2 s on a core, and there are eighths of one
    )
    process_look_s: float = 0.25
    ping_s: float = 5.0
    pong_s: float = 60.0
    frozen_s: float = 5.0  # between two looks: this process stood still itself
    again_first_s: float = 0.5  # before a new process after one that died without work, at first and at most
    again_most_s: float = 60.0
    close_s: float = 0.5  # it has to end by itself when the worker leaves
    ends_within_s: float = 10.0  # from the pipe's end: on a busy machine its memory takes seconds to go
    gone_within_s: float = 2.0  # killed processes leave their control group
    sandbox_probe_s: float = 20.0
    slack_bytes: int = 32 << 20  # page tables, stacks, heap edges: not what a job allocates
    data_slack_bytes: int = 512 << 20  # addresses that are reserved and not used: arenas, stacks of threads
    memory_look_s: float = 0.1
    report_s: float = 0.1  # between two signs of life of a request
    request_room_s: float = 1.0
    # Ops that take too long: a hang is found sooner, or a slow machine is let go on.
    least_deadline_s: float = 5.0
    unknown_deadline_s: float = 60.0  # of an op whose cost nobody knows
    most_deadline_s: float = 6 * 3600.0
    seen_s: float = 1.0  # shorter ops cost no look at the process
    steps_known: int = 2  # afterwards every op has run
    longest_steps: float = 3.0  # an op may take, once steps are known
    worked_share: float = 0.5  # of the time that it computed itself, or it is late only after ...
    patience: float = 12.0  # ... so many times as long
    # Tensors between the processes: memory, against waits of a sender.
    freed_at_once: int = (
        32  # blocks that were read and may wait for a message to travel with; and their bytes
    )
    freed_bytes: int = 8 << 20
    arena_room_s: float = 0.05
    blocks_a_key: int = 2  # at a time: one that a lost connection left, one for its repetition
    full_s: float = 5.0  # the process keeps within the transport's bounds: who waits so long has broken them
    replay_room_s: float = 0.2  # a peer whose queue is full makes way for the others
    connecting_poll_s: float = 0.1
    probed_within_s: float = 10.0  # a peer that is only measured
    # What lies on the disk for others.
    free_disk_share: float = 0.25  # of what is free, the most that the log takes, and the most that copies do
    segments: int = 16  # files that the log's bound is: the oldest goes as a whole
    copied_bytes: int = 64 << 10  # a shorter payload is copied, so that its block is free at once
    write_bytes: int = 256 << 10  # wait until somebody asks: each write costs a thread's wakening
    most_rest_s: float = 1.0  # after a piece of a copy: a line that stood still is no reason to
    peer_piece_bytes: int = 1 << 20
    peer_pieces_at_once: int = 4
    peer_connect_s: float = 5.0
    peer_answer_s: float = (
        60.0  # training's messages come first: behind 8 Mbit/s for two ranks 10 s were too few
    )
    peer_send_s: float = 1.0
    lent_within_s: float = 10.0  # until a neighbour has begun to fetch what it is to lend
    lent_poll_s: float = 0.1  # between two questions for it


TUNED = Tunables()
