"""Event files: records framed by their length, its CRC, and the data's CRC; and the scalars in them."""

from __future__ import annotations

import struct
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import google_crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HEAD: Final = 12  # the length and its CRC
_STRING: Final = 7  # TensorFlow's DT_STRING


def framed(data: bytes) -> bytes:
    """Return a record as it stands in a file."""
    head = struct.pack("<Q", len(data))
    return head + _masked(head) + data + _masked(data)


def records(data: bytes) -> Iterator[bytes]:
    """Yield the intact records up to the first torn or damaged one."""
    at = 0
    while at + _HEAD + 4 <= len(data):
        head = data[at : at + 8]
        length = int.from_bytes(head, "little")
        body, end = data[at + _HEAD : at + _HEAD + length], at + _HEAD + length + 4
        if data[at + 8 : at + _HEAD] != _masked(head) or end > len(data):
            return
        if data[end - 4 : end] != _masked(body):
            return
        yield body
        at = end


def proto(name: str) -> Any:
    """Return one of TensorBoard's protocol modules."""
    return import_module(f"tensorboard.compat.proto.{name}_pb2")


class EventFile:
    """Reads a file's events, one at a time. `damage` says what could not be read, once it was.

    An event with a wrong checksum is left out; where a length cannot be trusted, or the end is torn, reading
    ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        """Yield events as they were written."""
        parse = proto("event").Event.FromString
        with self.path.open("rb") as stream:
            at = 0
            while head := stream.read(_HEAD):
                if len(head) < _HEAD or head[8:] != _masked(head[:8]):
                    what = "ends within a record" if len(head) < _HEAD else "a wrong checksum of a length"
                    self.damage.append(f"{what} at byte {at}: {self.path}")
                    return
                length = int.from_bytes(head[:8], "little")
                data = stream.read(length + 4)
                if len(data) < length + 4:
                    self.damage.append(f"ends within a record at byte {at}: {self.path}")
                    return
                if data[length:] == _masked(data[:length]):
                    yield parse(data[:length])
                else:
                    self.damage.append(f"a wrong checksum at byte {at}: {self.path}")
                at += _HEAD + length + 4


def scalars(event: Any) -> Iterator[tuple[str, float | None]]:
    """Yield (tag, number) of every value in an event; None for what is no scalar (texts, histograms …)."""
    for value in event.summary.value:
        if value.HasField("simple_value"):
            yield value.tag, value.simple_value
        elif value.HasField("tensor") and not value.tensor.tensor_shape.dim and value.tensor.dtype != _STRING:
            yield value.tag, import_module("tensorboard.util.tensor_util").make_ndarray(value.tensor).item()
        else:
            yield value.tag, None


def _masked(data: bytes) -> bytes:
    crc: int = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
