"""Event files: records framed by their length, its CRC, and the data's CRC; and the scalars in them.

A step's event is the same bytes every time but for its numbers, as long as the names stay the same: these are
encoded once, the numbers put in their places.
"""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import google_crc32c
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_HEAD: Final = 12  # the length and its CRC
_STRING: Final = 7  # TensorFlow's DT_STRING
_SUMMARY: Final = b"\x2a"  # what an event's field `summary` begins with, before its length


class _Layout(NamedTuple):
    """The scalars of some names as they stand in an event, and where in there the numbers belong."""

    summary: NDArray[np.uint8]
    places: NDArray[np.intp]  # a row per number, a column per byte of it


def step_event(
    step: int, time: float, metrics: Mapping[str, float], more: bytes = b"", *, double: bool
) -> bytes:
    """Return a step's event: its metrics as scalars, of float32 or `double`; `more`: further values."""
    layout = (_doubles if double else _floats)(tuple(metrics))
    summary = layout.summary.copy()
    numbers = np.array(list(metrics.values()), "<f8")
    if not double:
        with np.errstate(over="ignore"):  # what is too large becomes infinite
            numbers = numbers.astype("<f4")
    summary[layout.places] = numbers.view(np.uint8).reshape(layout.places.shape)
    head = proto("event").Event(wall_time=time, step=step).SerializeToString()
    return head + _SUMMARY + _varint(len(summary) + len(more)) + summary.tobytes() + more


@lru_cache(maxsize=16)
def _floats(names: tuple[str, ...]) -> _Layout:
    value = proto("summary").Summary.Value
    return _layout([value(tag=name, simple_value=0.0) for name in names], 4, 0)


@lru_cache(maxsize=16)
def _doubles(names: tuple[str, ...]) -> _Layout:
    summary, tensor = proto("summary"), proto("tensor").TensorProto
    plugin = summary.SummaryMetadata(
        plugin_data=summary.SummaryMetadata.PluginData(plugin_name="scalars"),
        data_class=summary.DATA_CLASS_SCALAR,
    )
    zero = tensor(dtype="DT_DOUBLE", double_val=[0.0])
    values = [summary.Summary.Value(tag=name, metadata=plugin, tensor=zero) for name in names]
    # Fields stand in the order of their numbers: the tensor, which its number ends, before the metadata.
    return _layout(values, 8, len(summary.Summary.Value(metadata=plugin).SerializeToString()))


def _layout(values: list[Any], width: int, behind: int) -> _Layout:
    """Return the layout of values that hold a number of `width` bytes, `behind` bytes from their end."""
    parts = [proto("summary").Summary(value=[value]).SerializeToString() for value in values]
    ends = np.cumsum([len(part) for part in parts], dtype=np.intp) - behind
    places = ends[:, None] + np.arange(-width, 0)
    return _Layout(np.frombuffer(b"".join(parts), np.uint8), places)


def _varint(number: int) -> bytes:
    """Return a length as protobuf writes it."""
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


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


@cache
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


def place_of(event: bytes) -> tuple[int, float] | None:
    """Return the step and the time of an event that begins as `step_event` makes it; None for another."""
    time, at = (struct.unpack_from("<d", event, 1)[0], 9) if event[:1] == b"\x09" else (0.0, 0)
    step = 0
    if event[at : at + 1] == b"\x10":
        for shift in range(0, 70, 7):
            at += 1
            step |= (event[at] & 127) << shift
            if event[at] < 128:
                break
        at += 1
    return (step, time) if event[at : at + 1] == _SUMMARY else None


def scalars(event: Any) -> Iterator[tuple[str, float | None]]:
    """Yield (tag, number) of every value in an event; None for what is no scalar (texts, histograms …)."""
    for value in event.summary.value:
        if value.HasField("simple_value"):
            yield value.tag, value.simple_value
        elif value.HasField("tensor") and not value.tensor.tensor_shape.dim and value.tensor.dtype != _STRING:
            yield value.tag, _number(value.tensor)
        else:
            yield value.tag, None


def _number(tensor: Any) -> float | None:
    """Return the real number in a tensor without dimensions; None where there is something else."""
    try:
        found = import_module("tensorboard.util.tensor_util").make_ndarray(tensor).item()
        return found if isinstance(found, (int, float)) else None
    except (TypeError, ValueError):  # of no type that it knows, or not one value
        return None


def _masked(data: bytes) -> bytes:
    crc: int = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
