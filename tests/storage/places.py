"""Places on the servers of this folder, and what is stored in them."""

from __future__ import annotations

from typing import Any

from hetero_fw.checkpoint import ObjectPlace, is_object_store, list_checkpoints, open_root
from hetero_fw.checkpoint.object_store import ObjectStore
from tests.fault_proxy import FaultProxy
from tests.storage_server import StorageServer
from tests.unit.checkpoint.examples import PREFIX


def begin(url: str, attempt: int = 0, options: dict[str, Any] | None = None) -> ObjectPlace:
    place = ObjectPlace(url=url, attempt=attempt, options=options or {})
    place.claim()
    return place


def through(proxy: FaultProxy, server: StorageServer, url: str) -> ObjectPlace:
    """The same place as the environment leads to, on a way that can fail."""
    other_way = url.replace(server.root(), server.root(proxy.endpoint))
    return ObjectPlace(url=other_way, attempt=0, options=server.options(proxy.endpoint))


def open_place(url: str) -> Any:
    root = open_root(url)
    assert is_object_store(root)
    return root


def steps(place: ObjectPlace) -> list[int]:
    return [info.step for info in list_checkpoints(place.root, PREFIX)]


def keys(place: ObjectPlace) -> dict[str, int]:
    """Everything that is stored, but the claims of attempts, with its size."""
    stored = ObjectStore(place.root).list()
    return {key: item.size for key, item in stored.items() if not key.startswith(".attempts/")}


def unfinished_uploads(place: ObjectPlace) -> list[str]:
    """Keys of the multipart uploads that are under way or were left so; S3 alone shows them."""
    if place.root.protocol != "s3":
        return []
    bucket, prefix, _ = place.root.fs.split_path(place.root.path)
    page = place.root.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
    return [upload["Key"] for upload in page.get("Uploads") or ()]
