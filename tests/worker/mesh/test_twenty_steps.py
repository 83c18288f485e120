"""Sites of two and four processes over twenty steps."""

from __future__ import annotations

import pytest

from atoll.mesh.layout import Inside
from tests.worker.mesh.site import plain, site, train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.mark.parametrize("size", [2, 4])
def test_a_site_trains_as_one_process_does(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    with site(size, tmp_path_factory.mktemp("site")) as found:
        for kind in (Inside.SHARDS, Inside.TENSOR, Inside.DATA):
            for name in ("gpt2", "llama"):
                train(found, name, kind, steps=20)
        for name in ("gpt2", "llama", "mixtral"):
            for kind in (Inside.SEQUENCE, Inside.RING):
                train(found, plain(name), kind, steps=20)
        train(found, plain("mixtral"), Inside.EXPERTS, steps=20)
