"""Hard examples: samples perturbed by any generator, and those that were answered worst.

    harder = perturbed(samples, typos("prompt", rate=0.1), name="typos", copies=2)
    results = evaluate_distributed(score, [*samples, *harder])
    compute_aggregated_metrics(results, by=["perturbation"])    # how far each perturbation lowers the score
    again = mined(results, samples, "accuracy", share=0.1)      # the tenth that was answered worst

An adversarial generator is one that looks at the model: it is given the sample and its own random numbers,
and may do what it likes.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from eventlog import errors

from .samples import Field, id_of, ids_of, tags_of
from .sampling import number_of, share_of

if TYPE_CHECKING:
    from .results import SampleResult

__all__ = ["mined", "perturbed", "typos"]

Generator = Callable[[Any, random.Random], Any]
"""Returns another sample, or a mapping of what is to be different in it."""


def perturbed(
    samples: Iterable[Any],
    generator: Generator,
    *,
    name: str,
    copies: int = 1,
    seed: int = 0,
    sample_id: str = "id",
) -> list[Any]:
    """Return `copies` perturbed versions of every sample, with ids `id~name`, `id~name~1`, … and a tag.

    `generator(sample, rng)` returns a whole sample or only what differs; the same seed gives the same ones,
    whatever the order. The tag `perturbation` is the name. Samples are mappings or dataclasses with a field
    for the id and, where they are to be tagged, one named `tags` (mappings get it).
    """
    return [
        _perturbed(sample, generator, name, copy, seed, sample_id)
        for sample in samples
        for copy in range(copies)
    ]


def _perturbed(sample: Any, generator: Generator, name: str, copy: int, seed: int, sample_id: str) -> Any:
    origin = id_of(sample, sample_id)
    own = f"{origin}~{name}" + (f"~{copy}" if copy else "")
    made = generator(sample, random.Random(number_of(seed, own)))  # noqa: S311 - no secret
    # no tag of its own: samples of the same tags are recorded together
    tags = {**tags_of(sample), "perturbation": name}
    return _with(sample if isinstance(made, Mapping) else made, made, {sample_id: own, "tags": tags})


def _with(sample: Any, made: Any, about: Mapping[str, Any]) -> Any:
    """Return the sample with what the generator made, and the new id and tags."""
    new = {**(made if isinstance(made, Mapping) else {}), **about}
    if isinstance(sample, Mapping):
        return {**sample, **new}
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        known = {field.name for field in dataclasses.fields(sample)}
        return dataclasses.replace(sample, **{field: value for field, value in new.items() if field in known})
    raise errors.EvaluationError(
        f"expected a sample as a mapping or a dataclass, got {type(sample).__name__} {sample!r:.80}"
    )


def typos(field: str, rate: float = 0.05) -> Generator:
    """Return a generator that swaps neighbouring letters of a text field, each with probability `rate`."""

    def swap(sample: Any, rng: random.Random) -> dict[str, Any]:
        text = sample[field] if isinstance(sample, Mapping) else getattr(sample, field)
        letters = list(text)
        for i in range(len(letters) - 1):
            if letters[i].isalpha() and letters[i + 1].isalpha() and rng.random() < rate:
                letters[i], letters[i + 1] = letters[i + 1], letters[i]
        return {field: "".join(letters)}

    return swap


def mined(
    results: Iterable[SampleResult],
    samples: Iterable[Any],
    metric: str,
    *,
    share: float = 0.1,
    highest: bool = False,
    sample_id: Field = "id",
) -> list[Any]:
    """Return the samples that came out worst: ceil(share · n) with the lowest (or highest) value of a metric.

    Those without the metric are left out, NaN counts as worst, ties go by id. An EvaluationError for a metric
    that no result has.
    """
    if not 0 < share <= 1:
        raise errors.EvaluationError(f"expected a share above 0 and at most 1, got {share!r}")
    found = list(results)
    values = {each.id: each.values[metric] for each in found if metric in each.values}
    if found and not values:
        known = ", ".join(map(repr, sorted({name for each in found for name in each.values}))) or "none"
        raise errors.EvaluationError(f"expected the metric {metric!r} among the results, got {known}")
    sign = -1 if highest else 1

    def badness(each: str) -> tuple[float, str]:
        value = values[each]
        return (-math.inf if math.isnan(value) else sign * value), each

    chosen = set(sorted(values, key=badness)[: share_of(share, len(values))])
    return [sample for each, sample in ids_of(samples, sample_id).items() if each in chosen]
