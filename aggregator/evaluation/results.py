"""What an evaluation found, sample by sample; its metrics; and how they get into the log and the export.

    results = evaluate_distributed(score, samples)
    metrics = compute_aggregated_metrics(results, by=("modality",))
    log_evaluation_results(metrics)

The metrics are of all ranks' samples, and the same on all ranks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np

import eventlog
from eventlog import Recorder, Spread, as_key, as_metric, errors, moments

from .. import stats_tracker
from .samples import id_of, ids_of, tags_of

__all__ = [
    "SampleResult",
    "as_result",
    "compute_aggregated_metrics",
    "log_evaluation_results",
    "record_samples",
]

TRACKER = "eval-rollout"
N_SAMPLES = "n_samples"
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What was found for one sample: numbers and texts by name, its tags, and the rank that evaluated it."""

    id: str
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    tags: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rank: int = 0


def as_result(found: Any, sample: str, tags: Mapping[str, Any], rank: int) -> SampleResult:
    """Return what a function returned for a sample: one number (its "score"), or numbers and texts by name.

    None among the values is absent. An EvaluationError for anything else.
    """
    named = found if isinstance(found, Mapping) else {"score": found}
    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    for key, value in named.items():
        name = _name(key, sample)
        if isinstance(value, str):
            texts[name] = str.__str__(value)  # plain: it is told to the other ranks
        elif value is not None:
            values[name] = _number(value, name, sample)
    if found is None or (not isinstance(found, Mapping) and texts):
        raise errors.EvaluationError(
            f"expected a number, or numbers and texts by name, for sample {sample!r}, got {found!r:.80}"
        )
    return SampleResult(sample, values, texts, tags, rank)


def _name(key: Any, sample: str) -> str:
    """Return the name of a value: a text that the log takes, and not that of the count of samples."""
    expected = f"expected names of values as texts, other than {N_SAMPLES!r}, which counts the samples"
    try:
        taken = as_key(key) == N_SAMPLES
    except errors.RecordingError:
        taken = True
    if taken:
        raise errors.EvaluationError(f"{expected}, got {key!r} for sample {sample!r}")
    return str.__str__(key)


def _number(value: Any, name: str, sample: str) -> float:
    try:
        return float(as_metric(value, name))
    except errors.RecordingError:
        got = f"{type(value).__name__} {value!r:.80}"
        raise errors.EvaluationError(
            f"expected a number or a text for {name!r} of sample {sample!r}, got {got}"
        ) from None


def compute_aggregated_metrics(
    results: Iterable[SampleResult | Mapping[str, Any]], by: str | Sequence[str] = ()
) -> dict[str, float]:
    """Return the mean of every value over the samples that have it, each id once, and `n_samples`.

    `by` names tags: for each of their values the same comes under `tag/value/`, as `modality/text/accuracy`.
    The order of the results does not matter to the last bit, of repeated ids the first counts. Results may
    also be mappings with an "id" (or "sample_id") and numbers; an EvaluationError for one without, and for a
    tag that no sample has, and for a name that a value and a slice share.
    """
    unique: dict[str, SampleResult] = {}
    listed = list(results)
    rows = [each for each in listed if not isinstance(each, SampleResult)]
    for key in ("sample_id", "id"):
        ids_of((row for row in rows if _key_of(row) == key), key)  # refuses ids that are alike as texts
    for each in listed:
        result = each if isinstance(each, SampleResult) else _read(each)
        unique.setdefault(result.id, result)
    ordered = [unique[each] for each in sorted(unique)]
    metrics = _means(ordered)
    for tag in [by] if isinstance(by, str) else dict.fromkeys(by):
        slices: dict[str, list[SampleResult]] = defaultdict(list)
        for result in ordered:
            if tag in result.tags:
                value = result.tags[tag]
                slices[str(value.item() if hasattr(value, "item") else value)].append(result)
        if ordered and not slices:
            raise errors.EvaluationError(_untagged(tag, {name for result in ordered for name in result.tags}))
        for value in sorted(slices):
            for name, number in _means(slices[value]).items():
                if (own := f"{tag}/{value}/{name}") in metrics:
                    raise errors.EvaluationError(
                        f"expected names of values and of slices that differ, got {own!r} as both"
                    )
                metrics[own] = number
    return metrics


def _untagged(tag: str, known: Iterable[str]) -> str:
    near = get_close_matches(tag, sorted(known), _MOST_NAMED, 0)
    there = f"there are {', '.join(map(repr, near))}" if near else "there is none"
    return (
        f"expected a tag that some sample has, got {tag!r}; {there}: tags are what a sample says under "
        "'tags', or where `tags=` of evaluate_distributed says"
    )


def _key_of(row: Mapping[str, Any]) -> str:
    return "sample_id" if "sample_id" in row else "id"


def _read(row: Mapping[str, Any]) -> SampleResult:
    key = _key_of(row)
    sample = id_of(row, key)
    tags = tags_of(row)
    named = {name: value for name, value in row.items() if name not in (key, "tags", "rank")}
    return as_result(named, sample, tags, row.get("rank", 0))


def _means(results: Sequence[SampleResult]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.values.items():
            values.setdefault(name, []).append(value)
    means = {name: moments.mean(moments.of(np.array(values[name], np.float64))) for name in sorted(values)}
    return {N_SAMPLES: len(results), **{name: mean for name, mean in means.items() if mean is not None}}


def log_evaluation_results(
    metrics: Mapping[str, float], *, tracker: str = TRACKER, step: int | None = None
) -> None:
    """Record metrics in the `eval-rollout` tracker, for the next export; all its ranks call it alike.

    They are the whole evaluation's: every rank has the same numbers, which the export checks, and does not
    count again. What `evaluate_distributed` recorded sample by sample since the last export, or the workflow
    itself, stands as it is. `step` is that of the model that was measured, by default the one given to
    `evaluate_distributed`: what was measured is committed there, and nothing else moves.

    A second evaluation under the same names before the next export is refused with a RecordingError.
    """
    chosen = stats_tracker.get(tracker)
    recorder = chosen.recorder
    sampled = [name for name in metrics if recorder.sampled(name)]
    steps = [step, *map(recorder.own_step, sampled)]
    at = next((each for each in steps if each is not None), None)
    fresh = {name: value for name, value in metrics.items() if name not in sampled}
    held = {name: recorder.held(name) for name in fresh}
    again = [name for name, spec in held.items() if spec is not None and spec.spread is Spread.REPLICATED]
    _refuse_again(recorder, again)
    fresh = {name: value for name, value in fresh.items() if held[name] is None}
    chosen.declare(*fresh, spread=Spread.REPLICATED.value)
    if at is None:
        recorder.scalar(fresh)
    else:
        recorder.measured(fresh, at)


def _refuse_again(recorder: Recorder, names: Sequence[str]) -> None:
    """Raise a RecordingError if there are names; or, where mistakes are forgiven, let them be lost."""

    def refuse(**lost: Any) -> None:
        key = recorder.full_key(next(iter(lost)))
        refused = errors.RecordingError(
            f"expected one evaluation of {key!r} until its export, got a second one: "
            f"evaluate inside `with stats_tracker.get({recorder.name!r}).scope(…):` to keep them apart "
            "(an Evaluator with a name does), or with record=False"
        )
        eventlog.forgive(refused, lost, refuse, recorder.full_key)

    if names:
        refuse(**dict.fromkeys(names))


def record_samples(
    own: Sequence[SampleResult],
    names: Iterable[str],
    *,
    tracker: str = TRACKER,
    step: int | None = None,
    since: int | None = None,
) -> None:
    """Record this rank's results, each with its id and tags; `names` are those of all ranks.

    What the workflow recorded `since` then (UTC µs) of the same names and numbers is the same. A
    RecordingError for names of which the tracker holds an evaluation already.
    """
    recorder = stats_tracker.get(tracker).recorder
    again = [name for name in names if recorder.sampled(name)]
    _refuse_again(recorder, again)
    fresh = [name for name in names if name not in again]
    groups: dict[str, list[SampleResult]] = {"{}": []}
    for result in own:
        groups.setdefault(json.dumps(dict(result.tags), sort_keys=True), []).append(result)
    recorder.declare(fresh, Spread.SHARDS)
    for name in fresh:
        for results in groups.values():
            values = {each.id: each.values[name] for each in results if name in each.values}
            if values or not results:
                about = results[0].tags if results else None
                recorder.samples(name, values, tags=about, step=step, since=since)
