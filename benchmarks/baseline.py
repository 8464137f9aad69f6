"""The rival: a tracker that reduces as AReaL's does, written from its contract (shared by the benchmarks).

Recording clones every tensor and every mask. An export gathers the pickled metadata of all keys from all
ranks, and then issues one all-reduce of a single float per quantity, each read back at once: four for an
AVG_MIN_MAX stat (sum, count, least, greatest), two for a scalar, one for a denominator. Scopes, locks and
most checks are left out: they would only make it slower.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

AVG_MIN_MAX, SCALAR, DENOMINATOR = "avg_min_max", "scalar", "denominator"


class NaiveTracker:
    """Records clones; reduces key by key. `collectives` counts what it issued."""

    def __init__(self) -> None:
        self.collectives = 0
        self._clear()

    def _clear(self) -> None:
        self._kinds: dict[str, str] = {}
        self._mask_of: dict[str, str] = {}
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._numbers: dict[str, list[float]] = {}

    # -- recording ---------------------------------------------------------------------------------

    def denominator(self, **masks: torch.Tensor) -> None:
        for key, mask in masks.items():
            self._kinds[key] = DENOMINATOR
            self._tensors.setdefault(key, []).append(mask.detach().clone())

    def stat(self, denominator: str, **tensors: torch.Tensor) -> None:
        for key, tensor in tensors.items():
            self._kinds[key] = AVG_MIN_MAX
            self._mask_of[key] = denominator
            self._tensors.setdefault(key, []).append(tensor.detach().clone())

    def scalar(self, **values: float) -> None:
        for key, value in values.items():
            self._kinds[key] = SCALAR
            self._numbers.setdefault(key, []).append(float(value))

    # -- export ------------------------------------------------------------------------------------

    def export(self, group: dist.ProcessGroup) -> dict[str, float]:
        metadata = self._agree(group)
        found: dict[str, float] = {}
        for key in sorted(metadata):
            kind, _ = metadata[key]
            if kind == AVG_MIN_MAX:
                found |= self._average_and_extremes(key, group)
            elif kind == SCALAR:
                found |= self._scalar(key, group)
            else:
                masks = self._tensors.get(key, [])
                found[key] = self._reduced(sum((m.sum() for m in masks), torch.zeros(())), "SUM", group)
        self._clear()
        return found

    def _agree(self, group: dist.ProcessGroup) -> dict[str, tuple[str, str | None]]:
        own = {key: (kind, self._mask_of.get(key)) for key, kind in self._kinds.items()}
        gathered: list[dict[str, tuple[str, str | None]]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, own, group=group)
        self.collectives += 1
        merged: dict[str, tuple[str, str | None]] = {}
        for theirs in gathered:
            for key, meta in theirs.items():
                if merged.setdefault(key, meta) != meta:
                    raise ValueError(f"inconsistent metadata for {key}")
        return merged

    def _average_and_extremes(self, key: str, group: dist.ProcessGroup) -> dict[str, float]:
        pairs = list(zip(self._tensors.get(key, []), self._tensors.get(self._mask_of[key], []), strict=True))
        total = sum((torch.where(mask, x, 0.0).sum() for x, mask in pairs), torch.zeros(()))
        count = sum((mask.sum() for _, mask in pairs), torch.zeros(()))
        total, count = self._reduced(total, "SUM", group), self._reduced(count, "SUM", group)
        found = {f"{key}/avg": total / count} if count else {}
        least = torch.stack([torch.where(mask, x, math.inf).min() for x, mask in pairs]).min()
        if not math.isinf(value := self._reduced(least, "MIN", group)):
            found[f"{key}/min"] = value
        greatest = torch.stack([torch.where(mask, x, -math.inf).max() for x, mask in pairs]).max()
        if not math.isinf(value := self._reduced(greatest, "MAX", group)):
            found[f"{key}/max"] = value
        return found

    def _scalar(self, key: str, group: dist.ProcessGroup) -> dict[str, float]:
        values = self._numbers.get(key, [])
        total = self._reduced(torch.tensor(float(sum(values))), "SUM", group)
        count = self._reduced(torch.tensor(float(len(values))), "SUM", group)
        return {key: total / count if count else 0.0, f"{key}__count": int(count)}

    def _reduced(self, quantity: torch.Tensor, operation: str, group: dist.ProcessGroup) -> float:
        dist.all_reduce(quantity, op=getattr(dist.ReduceOp, operation), group=group)
        self.collectives += 1
        return float(quantity)
