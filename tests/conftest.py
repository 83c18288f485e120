"""What holds for every test: a busy machine makes none of them fail."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Examples are bounded in number; how long one takes says something of the machine only.
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit-equality holds for one thread count on both sides; one is the fastest here."""
    import torch  # tests that need none of it start without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
