"""S3 over HTTP: parts, ranges, create-only, and a store that does not answer."""

from __future__ import annotations

import hashlib
import http.client
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import StorageError, UsageError
from coordinator.storage import object_store
from coordinator.storage.mirrored_blobs import blob_store
from coordinator.storage.object_store import PART_BYTES, S3Objects
from tests.coordinator.storage.moto_server import Proxy, moto_server
from tests.patience import HUNG_S

pytest.importorskip("obstore", reason="the S3 client is missing: pip install 'atoll[s3]'")
pytestmark = pytest.mark.slow

BUCKET = "models"
URL = f"s3://{BUCKET}/atoll/blobs"


@pytest.fixture(scope="module")
def moto() -> Iterator[int]:
    with moto_server() as port:
        yield port


@pytest.fixture
def proxy(moto: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """moto with one empty bucket, behind the endpoint that the environment names."""
    direct(moto, "POST", "/moto-api/reset")
    direct(moto, "PUT", f"/{BUCKET}")
    with Proxy(moto).serve() as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found.port}")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield found


def direct(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HUNG_S)
    connection.request(method, path, body)
    answer = connection.getresponse()
    data = answer.read()
    assert answer.status in (200, 204), (answer.status, data)
    connection.close()
    return data


def file_of(folder: Path, data: bytes) -> tuple[str, Path]:
    name = hashlib.sha256(data).hexdigest()
    path = folder / name
    path.write_bytes(data)
    return name, path


def test_an_object_lies_below_the_prefix_where_its_blob_lies_in_the_folder(
    proxy: Proxy, tmp_path: Path
) -> None:
    objects = S3Objects(URL)
    name, path = file_of(tmp_path, b"weights")
    objects.put(name, path, 7)
    assert [path for _, path, _ in proxy.seen] == [f"/{BUCKET}/atoll/blobs/{name[:2]}/{name[2:]}"]
    direct(proxy.moto_port, "PUT", f"/{BUCKET}/atoll/blobs/readme.txt", b"not ours")
    direct(proxy.moto_port, "PUT", f"/{BUCKET}/other/{name[:2]}/{name[2:]}", b"not ours either")
    assert {n: at.size for n, at in objects.listed().items()} == {name: 7}
    assert objects.size(name) == 7


def test_a_large_object_goes_in_parts_and_comes_in_ranges(proxy: Proxy, tmp_path: Path) -> None:
    data = os.urandom(2 * PART_BYTES + 1000)
    store = blob_store(tmp_path / "a", URL)
    name = store.put(data)
    assert len(proxy.asked("POST", query="uploads")) == 1
    assert len(proxy.asked("PUT", query="partNumber=")) == 3
    elsewhere = blob_store(tmp_path / "b", URL)
    assert elsewhere.read(name) == data
    ranges = [headers["range"] for headers in proxy.asked("GET") if "range" in headers]
    assert ranges == [
        f"bytes=0-{PART_BYTES - 1}",
        f"bytes={PART_BYTES}-{2 * PART_BYTES - 1}",
        f"bytes={2 * PART_BYTES}-{2 * PART_BYTES + 999}",
    ]


@pytest.mark.parametrize("size", [7, PART_BYTES + 7])
def test_an_object_that_is_there_is_not_written_again(proxy: Proxy, tmp_path: Path, size: int) -> None:
    objects, data = S3Objects(URL), os.urandom(size)
    name, path = file_of(tmp_path, data)
    objects.put(name, path, size)
    path.write_bytes(bytes(size))
    before = len(proxy.seen)
    objects.put(name, path, size)
    assert objects.read(name, 0, 7) == data[:7]
    if size > PART_BYTES:
        assert [method for method, _, _ in proxy.seen[before:]] == ["HEAD", "GET"]
    else:
        assert proxy.asked("PUT", query=name[2:])[-1]["if-none-match"] == "*"


def test_a_missing_key_is_none_and_deleting_it_does_nothing(proxy: Proxy) -> None:
    objects = S3Objects(URL)
    assert objects.read("ab" * 32, 0, 10) is None
    assert objects.size("ab" * 32) is None
    objects.delete(["ab" * 32])
    objects.delete([])
    assert objects.listed() == {}


def test_more_objects_than_a_page_holds_are_listed_and_deleted(proxy: Proxy) -> None:
    names = {hashlib.sha256(b"%d" % at).hexdigest() for at in range(1010)}
    for name in names:
        direct(proxy.moto_port, "PUT", f"/{BUCKET}/atoll/blobs/{name[:2]}/{name[2:]}", b"x")
    objects = S3Objects(URL)
    assert objects.listed().keys() == names
    kept = names.pop()
    objects.delete(names)
    assert objects.listed().keys() == {kept}


def test_a_503_is_tried_again(proxy: Proxy, tmp_path: Path) -> None:
    objects = S3Objects(URL)
    name, path = file_of(tmp_path, b"weights")
    proxy.failing = 3
    objects.put(name, path, 7)
    assert len(proxy.asked("PUT", query=name[2:])) == 4
    proxy.failing = 2
    assert objects.read(name, 2, 3) == b"igh"
    proxy.failing = 2
    assert objects.listed().keys() == {name}


def test_a_part_that_meets_a_503_is_tried_again(proxy: Proxy, tmp_path: Path) -> None:
    data = os.urandom(PART_BYTES + 1)
    name, path = file_of(tmp_path, data)
    objects = S3Objects(URL)
    proxy.failing = 3
    objects.put(name, path, len(data))
    assert objects.size(name) == len(data)


def test_a_store_that_stays_away_is_a_storage_error_with_its_remedy(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "RETRIES", 2)
    store = blob_store(tmp_path, URL)
    proxy.failing = 10**6
    with pytest.raises(StorageError, match="jobs go on by themselves once it does"):
        store.put(b"weights")
    proxy.failing = 0
    name = store.put(b"weights")
    assert store.has(name)


def test_refused_credentials_and_a_missing_bucket_say_what_to_do(proxy: Proxy) -> None:
    proxy.failing, proxy.status = 10**6, 403
    with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID may list"):
        S3Objects(URL).listed()
    proxy.failing = 0
    with pytest.raises(StorageError, match="see that the bucket exists"):
        S3Objects("s3://nobody-made-this").listed()
    with pytest.raises(UsageError, match="names no bucket"):
        S3Objects("s3://")
