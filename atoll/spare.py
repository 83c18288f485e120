"""Spare time of a link: copies may delay the messages of training by so much at most, and no more.

A piece of a copy that leaves while training has nothing on its way costs nothing, until a message comes that
has to wait for the rest of it. Who sends counts these seconds (``worker.transport.peers.courtesy``), and who
plans predicts them, by the figures here.
"""

DELAY_SHARE = 0.05
"""Of the time, that copies may delay a worker's messages by; who waits for two in turn loses twice that."""
PIECE_S = 0.02
"""Of its link that a piece takes, what a message may wait behind: longer ones cost fewer questions."""
LEAST_PIECE_BYTES = 16 << 10
"""The smallest chunk that travels."""
MOST_PIECE_BYTES = 1 << 20


def piece_bytes(bytes_per_s: float) -> int:
    """Return the bytes of a piece on a link of this rate."""
    return int(min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, PIECE_S * bytes_per_s)))


def spare_share(bytes_per_s: float, busy: float, messages_per_s: float) -> float:
    """Return the share of a link that copies get beside training, whose messages are on their way for the
    share ``busy`` of the time.

    A piece alone delays training by itself while messages are on their way, else by half of it if one comes
    meanwhile: copies get ``DELAY_SHARE / delay``. Where messages come rarely they get more, whole idle times
    but for the pause behind a piece that was in the way, as far as it is longer than the message was.
    """
    busy, piece_s = min(1.0, busy), piece_bytes(bytes_per_s) / bytes_per_s
    delay = busy + (1.0 - busy) * min(1.0, messages_per_s * piece_s) / 2.0
    alone = DELAY_SHARE / max(DELAY_SHARE, delay)
    pause = messages_per_s * piece_s / (2.0 * DELAY_SHARE)
    idle = 1.0 - busy - (pause if pause < busy else pause - busy)
    return min(max(DELAY_SHARE, 1.0 - busy), max(alone, idle))
