"""Values on a device: kept there when recorded, reduced and packed there at export, fetched in one go.

torch is never imported here: who hands over a tensor on a device has loaded it. What waits for a device, and
when:

    record call   nothing: a clone, or an event, on the caller's stream
    export        once a device: for one vector with every count, moment and number (`fetch`)
    writer        for the event of each buffer of payload (`Parcel.array`), on its own thread

Buffers on the host are pinned, from torch's caching host allocator: a buffer goes back to that pool when the
writer drops it, and out again only after the copy into it is over. All of it works for tensors on the CPU
too, without streams and events.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from . import arrays, histogram
from .errors import RecordingError, RecordingTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

# Devices that have all that is used here, float64 and (but for the CPU) streams and events.
REDUCING: Final = ("cuda", "cpu")
_sides: dict[Any, Any] = {}  # device: the stream its payload is copied on


def _torch() -> Any:
    return sys.modules["torch"]


def _streams(device: Any) -> Any:
    """Return the module with the streams of a device; None where it has none."""
    return _torch().cuda if device.type == "cuda" else None


class Held:
    """A clone of a tensor, made in the order of the caller's stream."""

    __slots__ = ("_stream", "_tensor")

    def __init__(self, tensor: Any) -> None:
        streams = _streams(tensor.device)
        self._tensor = tensor.clone()
        self._stream = None if streams is None else streams.current_stream(tensor.device)

    def __len__(self) -> int:
        return len(self._tensor)

    @property
    def device(self) -> Any:
        """Where it lies."""
        return self._tensor.device

    @property
    def dtype(self) -> Any:
        """What its elements are, as torch names it."""
        return self._tensor.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._tensor.element_size()

    def tensor(self) -> Any:
        """Return the clone for use on the stream that is current now."""
        if self._stream is not None:
            stream = _streams(self.device).current_stream(self.device)
            if stream != self._stream:
                stream.wait_stream(self._stream)
                self._tensor.record_stream(stream)
        return self._tensor

    def array(self) -> NDArray[Any]:
        """Return the values on the host, half types widened; waits for the device."""
        return _widened(self.tensor()).cpu().numpy()


def reduces(held: Held) -> bool:
    """Whether the arithmetic below can be done where it lies."""
    return held.device.type in REDUCING


def _widened(tensor: Any) -> Any:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


# -- numbers that are known later -----------------------------------------------------------------


class Late:
    """A number that a device still works on; `read` returns it, at export."""

    def read(self) -> float:
        """Return the number; waits until it is there."""
        raise NotImplementedError


class Number(Late):
    """One number in a tensor on a device."""

    def __init__(self, tensor: Any, key: str) -> None:
        """Take a tensor with one real element; a RecordingTypeError names the key of any other."""
        if type(tensor).__name__ == "DTensor":
            raise RecordingTypeError(f"expected one number for {key!r}, got a DTensor; pass x.to_local()")
        if math.prod(tensor.shape) != 1 or tensor.is_complex():
            got = f"{arrays.dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}"
            raise RecordingTypeError(f"expected one number for {key!r}, got {got}")
        self.held = Held(tensor.detach())
        self._number: float | None = None

    def bits(self) -> Any:
        """Return the number as float64, as the bits that `take` takes."""
        return self.held.tensor().double().view(_torch().int64)

    def take(self, bits: NDArray[np.int64]) -> None:
        """Keep the number that was fetched."""
        self._number = float(bits.view(np.float64)[0])

    def read(self) -> float:
        """Return the number; waits for the device where it was not fetched."""
        return float(self.held.tensor().item()) if self._number is None else self._number


def as_scalar(value: Any, key: str) -> float | Number:
    """Return a recorded number as `arrays.as_scalar` does; one on a device is read later, without waiting."""
    if type(value) is float or arrays.on_host(value):
        return arrays.as_scalar(value, key)
    return Number(value, key)


class Lap(Late):
    """A stretch of a device's work, between two events on its current stream.

    Attributes: `name`, the kind of device: "cuda", or "cpu", whose clock is the host's.
    """

    def __init__(self, device: Any) -> None:
        """Begin; a RecordingError says where this process has no such device."""
        self._device = _checked(device)
        self.name = "cpu" if self._device is None else self._device.type
        self._events: list[Any] = []
        self._mark()

    def _mark(self) -> None:
        if self._device is not None:
            streams = _streams(self._device)
            event = streams.Event(enable_timing=True)
            event.record(streams.current_stream(self._device))
            self._events.append(event)

    def stop(self, seconds: float) -> float | Lap:
        """End it without waiting, and return what to record; `seconds` passed on the host."""
        self._mark()
        return self if self._events else seconds

    def read(self) -> float:
        """Return the seconds between the events; waits for the second one."""
        began, ended = self._events
        ended.synchronize()
        return began.elapsed_time(ended) / 1000


def _checked(device: Any) -> Any:
    """Return a device with a clock of its own; None for the CPU, whose clock is the host's."""
    if getattr(device, "type", device) == "cpu":
        return None
    expected = "expected a device with a clock that this process has ('cuda', 'cuda:0', 'cpu')"
    torch = sys.modules.get("torch")
    if torch is None:
        raise RecordingError(f"{expected}, got {device!r}, and torch is not loaded")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise RecordingError(f"{expected}, got {device!r}") from None
    streams = _streams(found)
    if streams is None or not streams.is_available() or (found.index or 0) >= streams.device_count():
        raise RecordingError(f"{expected}, got {device!r}")
    return found


# -- arithmetic on the device ---------------------------------------------------------------------


def sent(mask: NDArray[np.bool_], place: Any) -> Any:
    """Return a mask of the host on a device."""
    return _torch().from_numpy(mask).to(place, non_blocking=True)


def stacked(rows: Sequence[Held]) -> Any:
    """Return tensors of one dtype as the rows of one matrix, half types widened to float32."""
    return _widened(_torch().stack([held.tensor().reshape(-1) for held in rows]))


def numpy_dtype(tensor: Any) -> np.dtype[Any]:
    """Return the dtype that float32 and float64 tensors have in numpy."""
    return np.dtype(arrays.dtype_name(tensor.dtype))


def moments_of(matrix: Any, mask: Any) -> Any:
    """Return the moments of what the mask selects in each row of (n, elements): int64 (n, moments.WORDS).

    The rows are those of `moments.of_matrix` over the selected values: the same counts and extremes (0.0 and
    -0.0 are the same extreme), and the same sums up to the order in which float64 adds.
    """
    torch = _torch()
    finite = matrix.isfinite() & mask
    odd = ~finite
    ones = torch.ones(len(matrix), dtype=torch.int64, device=matrix.device)
    integers = torch.stack(
        [
            ones,  # PRESENT
            ones * mask.sum(),  # COUNT
            (matrix.isnan() & mask).sum(1),
            ((matrix == math.inf) & mask).sum(1),
            ((matrix == -math.inf) & mask).sum(1),
            ones * 0,  # INT_SUM
        ],
        dim=1,
    )
    floats = torch.stack(
        [
            matrix.masked_fill(odd, 0.0).sum(1, dtype=torch.float64),
            matrix.masked_fill(odd, math.inf).amin(1).double(),
            matrix.masked_fill(odd, -math.inf).amax(1).double(),
        ],
        dim=1,
    )
    return torch.cat([integers, floats.view(torch.int64)], dim=1)


def counts_of(matrix: Any, mask: Any) -> Any:
    """Return the histogram of what the mask selects in each row of (n, elements): int64 (n, BUCKETS).

    The counts are those of `histogram.of` over the selected values.
    """
    torch = _torch()
    edges = torch.from_numpy(histogram.EDGES[:-1]).to(matrix.device, non_blocking=True)
    sides = torch.searchsorted(edges, matrix.double().abs(), right=True)
    buckets = torch.where(matrix < 0, histogram.SIDE - sides, histogram.SIDE + sides)
    counts = torch.zeros((len(matrix), histogram.BUCKETS), dtype=torch.int64, device=matrix.device)
    return counts.scatter_add_(1, buckets, (matrix.isfinite() & mask).long())


def selected(matrix: Any, mask: Any, count: int) -> Any:
    """Return the columns of (n, elements) that the mask selects, in order; it selects `count` of them."""
    if count == len(mask):
        return matrix
    torch = _torch()
    wanted = torch.arange(1, count + 1, device=mask.device)
    return matrix.index_select(1, torch.searchsorted(mask.cumsum(0), wanted))  # nonzero() would wait


def packed(mask: Any) -> Any:
    """Return a mask of one dimension a bit per element, lowest bit first, as numpy.packbits does."""
    torch = _torch()
    bits = mask.new_zeros(-(-len(mask) // 8) * 8)
    bits[: len(mask)] = mask
    weights = 2 ** torch.arange(8, device=mask.device)
    return (bits.view(-1, 8) * weights).sum(1).to(torch.uint8)


# -- to the host ----------------------------------------------------------------------------------


class Parcel:
    """A tensor on its way to the host: `send` starts the copy without waiting, `array` waits for it.

    The copy runs on a stream of its own, behind what makes the tensor, into pinned memory.
    """

    def __init__(self, make: Callable[[], Any], rows: int, nbytes: int) -> None:
        """Promise the tensor that `make` returns, of so many rows and bytes; it is made by `send`."""
        self.nbytes = nbytes
        self._rows = rows
        self._make: Callable[[], Any] | None = make
        self._host: Any = None
        self._arrived: Any = None
        self._failed: Exception | None = None

    def __len__(self) -> int:
        return self._rows

    def send(self) -> None:
        """Start the copy. What fails is raised by `array`: it is the payload's loss, not the export's."""
        if self._make is None:
            return
        try:
            self._copy(self._make())
        except Exception as error:  # noqa: BLE001 - out of memory above all
            self._failed = error
        self._make = None

    def _copy(self, tensor: Any) -> None:
        torch, streams = _torch(), _streams(tensor.device)
        if streams is None:
            self._host = tensor.cpu().contiguous()
            return
        side = _sides.get(tensor.device)
        if side is None:
            side = _sides[tensor.device] = streams.Stream(tensor.device)
        side.wait_stream(streams.current_stream(tensor.device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        with streams.stream(side):
            host.copy_(tensor, non_blocking=True)
            self._arrived = streams.Event()
            self._arrived.record(side)
        tensor.record_stream(side)  # its memory is not given out again before the copy is over
        self._host = host

    def array(self) -> NDArray[Any]:
        """Return the values on the host; waits until they are there."""
        self.send()
        if self._failed is not None:
            raise self._failed
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()


def landed(values: NDArray[Any] | Parcel) -> NDArray[Any]:
    """Return an array as it is, and what a parcel brings."""
    return values if isinstance(values, np.ndarray) else values.array()


def fetch(parts: Sequence[Any]) -> list[NDArray[np.int64]]:
    """Bring int64 tensors to the host, flattened: one copy and one wait per device, whatever their number."""
    torch = _torch()
    found: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(parts)
    for device in dict.fromkeys(part.device for part in parts):
        own = [i for i, part in enumerate(parts) if part.device == device]
        joined = torch.cat([parts[i].reshape(-1) for i in own])
        vector = Parcel(lambda joined=joined: joined, len(joined), 8 * len(joined)).array()
        ends = np.cumsum([parts[i].numel() for i in own])
        for i, piece in zip(own, np.split(vector, ends[:-1]), strict=True):
            found[i] = piece
    return found
