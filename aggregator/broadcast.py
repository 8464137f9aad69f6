"""Broadcasting containers of tensors: few large messages, however many tensors there are.

What a rank of a model-parallel group is to evaluate reaches the others of its group in one piece: a header
that says what the container is, then the bytes of all small tensors in one message, and each large tensor in
one of its own, uncopied.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from eventlog import errors

from . import collective

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed import ProcessGroup

__all__ = ["broadcast_tensor_container"]

_OWN_MESSAGE: Final = 16 << 20  # bytes from which packing a tensor costs more than sending it by itself


def broadcast_tensor_container(data: Any, src_rank: int = 0, group: ProcessGroup | None = None) -> Any:
    """Return the container of global rank `src_rank` on every rank of the group; all of them must call it.

        batch = broadcast_tensor_container(batch if dist.get_rank() == 0 else None, src_rank=0,
        group=mp_group)

    `data` is any nesting of dicts, lists, tuples and whatever else pickles, with dense tensors of any dtypes,
    shapes and strides in it; what the other ranks pass is ignored. The source gets its own data back. The
    others get tensors without gradients, on the kind of device they came from, contiguous; small ones share
    memory: clone what is kept for long. A tensor that occurs twice is sent once.

    Raises on every rank when the source cannot send: there its own error, elsewhere a PeerError.
    """
    acting, members, at = collective.joined(group)
    if src_rank not in members:
        raise errors.AgreementError(f"expected a source among ranks {list(members)}, got {src_rank}")
    if acting is None or len(members) == 1:
        return data
    if members[at] == src_rank:
        return _send(data, src_rank, acting)
    return _receive(src_rank, acting)


class _Spec(NamedTuple):
    """A tensor as the header describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str  # its type: "cpu", "cuda"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def _send(data: Any, source: int, group: ProcessGroup) -> Any:
    try:  # whatever may fail does so before the header is out: after it the peers wait for every message
        described, tensors = _described(data)
        specs = [_Spec(tensor.dtype, tuple(tensor.shape), tensor.device.type) for tensor in tensors]
        messages = [_packed([tensors[i] for i in message]) for message in _messages(specs)]
    except Exception as error:
        collective.broadcast_object(f"{type(error).__name__}: {error}", source, group)
        raise
    collective.broadcast_object((described, specs), source, group)
    for message in messages:
        collective.broadcast(message, message.numel(), source, group)
    return data


def _receive(source: int, group: ProcessGroup) -> Any:
    told = collective.broadcast_object(None, source, group)
    if isinstance(told, str):
        raise errors.PeerError(f"expected a container from rank {source}, which failed: {told}")
    described, specs = told
    tensors: list[torch.Tensor] = [
        torch.empty(spec.shape, dtype=spec.dtype, device=spec.device) if not spec.nbytes else _UNSENT
        for spec in specs
    ]
    for message in _messages(specs):
        sizes = [specs[i].nbytes for i in message]
        received = collective.broadcast(None, sum(sizes), source, group).to(specs[message[0]].device)
        for i, part in zip(message, received.split(sizes), strict=True):
            tensors[i] = part.view(specs[i].dtype).view(specs[i].shape)
    return _Reader(io.BytesIO(described), tensors).load()


_UNSENT: Final = torch.empty(0)


def _messages(specs: Sequence[_Spec]) -> Iterator[list[int]]:
    """Yield which tensors go together, the same on all ranks.

    Per device, and wide dtypes first, so that each lies where its dtype can be read.
    """
    for device in sorted({spec.device for spec in specs}):
        own = [i for i, spec in enumerate(specs) if spec.device == device and spec.nbytes]
        packed = [i for i in own if specs[i].nbytes < _OWN_MESSAGE]
        yield from ([i] for i in own if specs[i].nbytes >= _OWN_MESSAGE)
        if packed:
            yield sorted(packed, key=lambda i: -specs[i].dtype.itemsize)


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of the tensors of one message, on the first one's device; of one alone uncopied."""
    parts = [_bytes_of(tensor) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].device) for part in parts])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in order as flat bytes, copied only if they do not lie in order."""
    ordered = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # reshape would keep the stride of a single element, which no view as bytes takes
    return ordered.as_strided((ordered.numel(),), (1,)).view(torch.uint8)


def _described(data: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return a container without its tensors, pickled, and the tensors."""
    text = io.BytesIO()
    writer = _Writer(text, pickle.HIGHEST_PROTOCOL)
    writer.dump(data)
    return text.getvalue(), writer.tensors


class _Writer(pickle.Pickler):
    """Pickles everything but tensors, for which it writes down their numbers."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of a tensor."""
        if not isinstance(obj, torch.Tensor):
            return None
        if (what := _unsendable(obj)) is not None:
            raise errors.EvaluationError(f"expected dense local tensors in the container, got {what}")
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


def _unsendable(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is that has no bytes of its own in order; None for the others."""
    if type(tensor).__name__ == "DTensor":
        return "a DTensor"
    if tensor.is_nested:
        return "a nested one"
    if tensor.is_quantized:
        return f"a quantized one ({tensor.dtype})"
    if tensor.layout != torch.strided or tensor.is_meta:
        return f"a {tensor.layout} one on {tensor.device}"
    return None


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` wrote; it comes from a rank of one's own job."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Return the tensor of that number."""
        return self._tensors[pid]
