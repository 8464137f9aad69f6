"""Metrics of texts, by the libraries that are quoted in papers, which come with the extra `eval`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from eventlog import errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__all__ = ["bleu", "rouge"]


def bleu(hypotheses: Sequence[str], references: Sequence[str | Sequence[str]]) -> float | None:
    """Return corpus BLEU, 0 to 100: brevity penalty · exp(¼ Σ log p_n), n = 1 … 4.

    By sacrebleu with its defaults (Papineni et al. 2002; Post 2018, arXiv:1804.08771), over the corpus: not
    the mean of sentences. `references` has one or several per hypothesis. Needs the extra `eval`.
    """
    texts = _paired(hypotheses, references)
    if not texts:
        return None
    sacrebleu = _library("sacrebleu")
    most = max(len(wanted) for _, wanted in texts)
    streams = [[wanted[i] if i < len(wanted) else None for _, wanted in texts] for i in range(most)]
    return float(sacrebleu.corpus_bleu([text for text, _ in texts], streams).score)


def rouge(
    hypotheses: Sequence[str],
    references: Sequence[str | Sequence[str]],
    kinds: Sequence[str] = ("rouge1", "rouge2", "rougeL"),
) -> dict[str, float]:
    """Return the mean F1 of each kind of ROUGE, 0 to 1, of several references the best; {} without texts.

    By rouge-score with stemming (Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries"), which
    sees Latin letters and digits only: texts in other scripts come to 0.0, however alike. Needs the extra
    `eval`.
    """
    texts = _paired(hypotheses, references)
    if not texts:
        return {}
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    scorer = _library("rouge_score.rouge_scorer").RougeScorer(kinds, use_stemmer=True)
    scores = [[scorer.score(each, text) for each in wanted] for text, wanted in texts]
    best = {kind: [max(score[kind].fmeasure for score in found) for found in scores] for kind in kinds}
    return {kind: float(np.mean(found)) for kind, found in best.items()}


def _paired(hypotheses: Sequence[Any], references: Sequence[Any]) -> list[tuple[str, list[str]]]:
    for name, given in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(given, str):
            raise errors.EvaluationError(f"expected {name} as a list of texts, got one text {given!r:.80}")
    if len(hypotheses) != len(references):
        raise errors.EvaluationError(
            f"expected a reference for each of {len(hypotheses)} hypotheses, got {len(references)}"
        )
    wanted: list[list[Any]] = [
        list(each) if isinstance(each, Iterable) and not isinstance(each, str) else [each]
        for each in references
    ]
    if empty := [i for i, each in enumerate(wanted) if not each]:
        raise errors.EvaluationError(
            f"expected a reference for each hypothesis, got none: references[{empty[0]}]"
        )
    strange = [each for part in (hypotheses, *wanted) for each in part if not isinstance(each, str)]
    if strange:
        got = f"{type(strange[0]).__name__} {strange[0]!r:.80}"
        raise errors.EvaluationError(f"expected hypotheses and references as texts, got {got}")
    return list(zip(hypotheses, wanted, strict=True))


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise errors.DependencyError(
            f"expected the package {package} for this metric, got none; pip install 'areal-metrics[eval]'"
        ) from error
