"""Names of the devices of one machine."""

from __future__ import annotations

import pytest

from atoll.errors import AccessDenied
from protos.devices import MAX_DEVICES, device_metadata, device_name, machine_of, named_in


@pytest.mark.parametrize("number", [0, 1, MAX_DEVICES - 1])
def test_a_devices_call_is_read_as_the_device_that_made_it(number: int) -> None:
    name = device_name("w-1", number)
    assert named_in("w-1", device_metadata(number)) == name
    assert machine_of(name) == "w-1"


def test_the_first_device_has_the_machines_own_name() -> None:
    assert (device_name("w-1", 0), device_metadata(0)) == ("w-1", ())
    assert named_in("w-1", None) == "w-1"


@pytest.mark.parametrize("number", ["0", "01", "-1", "1/2", "x", str(MAX_DEVICES), "999", b"1"])
def test_a_number_that_no_device_has_is_refused(number: str | bytes) -> None:
    with pytest.raises(AccessDenied, match="devices"):
        named_in("w-1", [("atoll-device", number)])
