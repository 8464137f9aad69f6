"""What a reader knows of one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .schema import Stream
from .segment import NOTHING_TOLD, Loss, Pruned, Told
from .windows import WindowSet

if TYPE_CHECKING:
    from .rundir import Producer


@dataclass(slots=True)
class SessionState:
    """How far one process got. Its records decide which windows count; payload is told apart."""

    producer: Producer
    complete: WindowSet = field(default_factory=WindowSet)  # windows with all their records
    incomplete: WindowSet = field(default_factory=WindowSet)  # with some missing, damaged or still to come
    payload: WindowSet = field(default_factory=WindowSet)  # with all their payload, as its index says
    heartbeat_us: int = 0  # last sign of life, UTC
    ended: bool = False  # closed in order
    policy: str = ""  # which of the payload the process kept (full, sample, off …); "": unknown
    losses: list[Loss] = field(default_factory=list[Loss])  # as the process noted them, and what is missing
    pruned: set[int] = field(default_factory=set[int])  # payload segments removed to keep a budget …
    prunes: list[Pruned] = field(default_factory=list[Pruned])  # … and what was in them
    told: Told = NOTHING_TOLD  # what the process said of itself with its last sign of life
    bytes: Counter[Stream] = field(default_factory=Counter[Stream])  # on the disk, indexes included
    closed: set[Stream] = field(default_factory=set[Stream])  # streams whose newest segment ends in order …
    counted: set[Stream] = field(default_factory=set[Stream])  # … and of whose last frames no number is lost
    unsealed: Counter[Stream] = field(default_factory=Counter[Stream])  # of a frame begun and not finished
