"""The command line `areal-metrics` asks: where runs are, what is in them, and to retell them."""

from __future__ import annotations

__all__: list[str] = []
