"""The metrics of an evaluation, as pure functions; None where there is nothing to say.

    generation   bleu, rouge, sequence_consistency_score
    reasoning    accuracy, step_validity, pass_at_k, avg_at_k, maj_at_k, mean_of_stds, std_of_means
    RL           discounted_reward, policy_entropy, value_variance, explained_variance

`metrics_for(task)` returns those that belong to a task. Where arrays are taken, tensors on any device and
numpy arrays are: sums are in float64, chunk by chunk where the input is long. How to read them: entropy early
(it shows whether the policy still explores), the consistency of sequences late (it shows what fluency costs).
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eventlog import errors, moments

from .texts import bleu, rouge

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = [
    "accuracy",
    "avg_at_k",
    "bleu",
    "discounted_reward",
    "explained_variance",
    "maj_at_k",
    "mean_of_stds",
    "metrics_for",
    "pass_at_k",
    "policy_entropy",
    "rouge",
    "sequence_consistency_score",
    "std_of_means",
    "step_validity",
    "token_entropies",
    "value_variance",
]

_CHUNK: Final = 1 << 20  # numbers in float64 at a time: 8 MiB


# -- answers ---------------------------------------------------------------------------------------


def accuracy(predictions: Iterable[Any], references: Iterable[Any]) -> float | None:
    """Return the share of predictions that equal their reference: (1/N) Σ [p_i = r_i].

    Sequences and arrays are equal when all they hold is. Raises an EvaluationError when there are more of
    one than of the other.
    """
    given, wanted = _listed(predictions), _listed(references)
    if len(given) != len(wanted):
        raise errors.EvaluationError(f"expected {len(wanted)} predictions, one a reference, got {len(given)}")
    return _mean([bool(p == r) for p, r in zip(given, wanted, strict=True)])


def step_validity(
    steps: Iterable[Any], check: Callable[[Any, list[Any]], bool] | None = None
) -> float | None:
    """Return the share of reasoning steps that are valid: (1/T) Σ [step t is valid given the steps before].

    `check(step, before)` judges a step; without it `steps` are the judgements.
    """
    before: list[Any] = []
    valid: list[bool] = []
    for step in steps:
        valid.append(bool(step if check is None else check(step, before)))
        before.append(step)
    return _mean(valid)


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Return the chance that at least one of k of n attempts, of which c are right, is right; None if k > n.

    1 - C(n-c, k) / C(n, k), unbiased, as the product 1 - Π_{i=n-c+1}^{n} (1 - k/i), which neither overflows
    nor cancels (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374).
    Drawing k attempts with replacement would give less.
    """
    n, c, k = _whole(n, "n"), _whole(c, "c"), _whole(k, "k")
    if not 0 <= c <= n or k < 1:
        raise errors.EvaluationError(f"expected 0 <= c <= n and k >= 1, got n={n}, c={c}, k={k}")
    if k > n:
        return None
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def avg_at_k(scores: Sequence[float], k: int | None = None) -> float | None:
    """Return the mean score of the first k attempts (or of all): (1/k) Σ s_i; None if there are fewer."""
    k = _attempts(k)
    if k is not None and k > len(scores):
        return None
    return _mean(scores[:k])


def maj_at_k(answers: Sequence[Hashable], reference: Hashable, k: int | None = None) -> float | None:
    """Return whether the answer given most often in the first k attempts is right; None if there are fewer.

    Answers that tie share the vote: 1/m where the right one is one of m that were given most often, which is
    what drawing among them comes to (Wang et al. 2022, "Self-Consistency", arXiv:2203.11171). Tensors and
    arrays are answers by what they hold.
    """
    k = _attempts(k)
    if not len(answers) or (k is not None and k > len(answers)):
        return None
    votes = Counter(_listed(answers[:k]))
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return 1.0 / len(winners) if _frozen(reference) in winners else 0.0


def _attempts(k: Any) -> int | None:
    if k is None:
        return None
    number = _whole(k, "k")
    if number < 1:
        raise errors.EvaluationError(f"expected k >= 1 attempts, or None for all, got {k}")
    return number


def _whole(value: Any, name: str) -> int:
    """Return a count as int: an integer of any kind, or an integral float, such as a sum of rewards."""
    try:
        return operator.index(value)
    except TypeError:
        number = _frozen(value)
    if isinstance(number, float) and number.is_integer():
        return int(number)
    raise errors.EvaluationError(f"expected {name} as a whole number, got {value!r:.80}")


def _listed(values: Any) -> list[Any]:
    """Return values that can be compared, and counted: see `_frozen`."""
    return [_frozen(each) for each in (values.tolist() if hasattr(values, "tolist") else values)]


def _frozen(value: Any) -> Any:
    """Return what a tensor, an array or a sequence holds, as plain numbers and tuples; all else as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def mean_of_stds(scores: Sequence[Sequence[float]]) -> float | None:
    """Return how far attempts at one prompt are apart: the mean over prompts of their deviation.

    (1/P) Σ_p sqrt((1/K) Σ_k (s_pk - s̄_p)²), `scores` prompts by attempts. Not `std_of_means`, though both
    have been called "std@k".
    """
    return _mean([math.sqrt(_variance(_host(row))) for row in scores if len(row)])


def std_of_means(scores: Sequence[Sequence[float]]) -> float | None:
    """Return how far whole runs of the prompts are apart: the deviation, over attempts, of their mean scores.

    sqrt((1/K) Σ_k (s̄_k - s̄)²), `scores` prompts by attempts; None without any. Raises an EvaluationError
    when prompts have different numbers of attempts. Not `mean_of_stds`, though both have been called "std@k".
    """
    if len({len(row) for row in scores}) > 1:
        lengths = sorted({len(row) for row in scores})
        raise errors.EvaluationError(f"expected as many attempts of every prompt, got {lengths}")
    table = _host(scores)
    return math.sqrt(_variance(table.mean(axis=0))) if table.size else None


# -- sequences -------------------------------------------------------------------------------------


def discounted_reward(rewards: Iterable[float], gamma: float = 1.0) -> float:
    """Return Σ_{t=1}^{T} gamma^(t-1) r_t of one episode (Sutton & Barto 2018, eq. 3.8); 0 of none."""
    total = 0.0
    for reward in reversed(list(rewards)):  # Horner's scheme
        total = float(_host(reward).item()) + float(gamma) * total
    return total


def sequence_consistency_score(states: Any) -> float | None:
    """Return 1/(N-1) Σ cos(v_i, v_{i+1}) over the hidden states of N tokens; None of fewer than two.

    `states` has shape (N, D), or is an iterable of such blocks in order, for sequences that are never in
    memory as a whole. A vector of zeros has no direction: its cosines count as 0. Works through 8 MiB at a
    time.
    """
    total, pairs = 0.0, 0
    last: Floats | None = None
    for block in _blocks(states):
        units = _units(block)
        chain = units if last is None else np.concatenate([last, units])
        total += float(np.einsum("ij,ij->", chain[:-1], chain[1:]))
        pairs += len(chain) - 1
        last = units[-1:].copy()
    return total / pairs if pairs else None


def _units(block: Floats) -> Floats:
    """Return the rows at length 1, those of zeros as they are; right for rows of any size."""
    largest = np.abs(block).max(axis=1, keepdims=True, initial=0.0)  # squares of it might not be numbers
    with np.errstate(invalid="ignore"):  # an infinite row has no direction: NaN
        units = np.divide(block, largest, out=np.zeros_like(block), where=largest != 0)
    lengths = np.linalg.norm(units, axis=1, keepdims=True)
    return np.divide(units, lengths, out=units, where=lengths != 0)


def _blocks(states: Any) -> Iterator[Floats]:
    """Yield blocks of rows of at most about `_CHUNK` numbers, never empty, in float64 on the host."""
    for block in [states] if hasattr(states, "shape") else states:
        part = block if hasattr(block, "shape") else _host(block)
        if len(part.shape) != 2:
            raise errors.EvaluationError(
                f"expected hidden states (tokens, width), got shape {tuple(part.shape)}"
            )
        rows = max(1, _CHUNK // max(1, part.shape[1]))
        for first in range(0, part.shape[0], rows):
            yield _host(part[first : first + rows])


# -- policy and value ------------------------------------------------------------------------------


def token_entropies(logits: Any, mask: Any = None) -> Floats:
    """Return -Σ π log π in nats for every token that `mask` selects (or for all), in order, on the host.

    `logits` has shape (…, vocabulary), `mask` (…), of booleans or of the integers 0 and 1. With z = x - max x
    it is log Σ e^z - Σ π z: stable for logits of any size, and right where some are -inf. In float64 on the
    device the logits lie on, 8 MiB at a time (float32 where the device has no float64).
    """
    rows = logits.detach() if hasattr(logits, "detach") else np.asarray(logits)
    shape = tuple(rows.shape)
    rows = rows.reshape(-1, shape[-1])
    if mask is not None:
        rows = rows[_checked(mask, shape[:-1])]
    step = max(1, _CHUNK // max(1, shape[-1]))
    entropies = [_entropies(rows[first : first + step]) for first in range(0, rows.shape[0], step)]
    return np.concatenate(entropies) if entropies else np.empty(0)


def _entropies(rows: Any) -> Floats:
    least = np.finfo(np.float32).min  # stands for -inf, whose probability is 0: 0 · -inf would be NaN
    if isinstance(rows, np.ndarray):
        x = rows.astype(np.float64)
        z = np.maximum(x - x.max(axis=-1, keepdims=True), least)
        weights = np.exp(z)
        total = weights.sum(axis=-1)
        return np.log(total) - (weights * z).sum(axis=-1) / total
    x = rows.float() if rows.device.type == "mps" else rows.double()
    z = (x - x.amax(dim=-1, keepdim=True)).clamp(min=float(least))
    weights = z.exp()
    total = weights.sum(dim=-1)
    return _host(total.log() - (weights * z).sum(dim=-1) / total)


def policy_entropy(logits: Any, mask: Any = None) -> float | None:
    """Return the mean of `token_entropies`, in nats (Shannon 1948); None when no token is selected."""
    return _mean(token_entropies(logits, mask))


def value_variance(values: Any, mask: Any = None) -> float | None:
    """Return the variance of the selected values, (1/N) Σ (V_i - mean V)²; None when there is none.

    `mask` has the shape of the values, of booleans or of the integers 0 and 1. Equal values have exactly 0.
    """
    selected = _selected(values, mask)
    return _variance(selected) if len(selected) else None


def explained_variance(values: Any, returns: Any, mask: Any = None) -> float | None:
    """Return 1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one, below it for a worse one.

    As OpenAI Baselines define it; None where the returns do not vary.
    """
    predicted, observed = _selected(values, mask), _selected(returns, mask)
    if len(predicted) != len(observed):
        raise errors.EvaluationError(f"expected {len(observed)} values, one a return, got {len(predicted)}")
    spread = _variance(observed) if len(observed) else 0.0
    return None if spread == 0 else 1.0 - _variance(observed - predicted) / spread


def _variance(values: Floats) -> float:
    """Return the population's variance, about the first value: that of equal ones is exactly 0."""
    with np.errstate(invalid="ignore"):  # infinities vary by NaN
        return float((values - values[0]).var())


def _selected(array: Any, mask: Any) -> Floats:
    values = _host(array)
    return values.reshape(-1) if mask is None else values.reshape(-1)[_checked(mask, values.shape)]


def _checked(mask: Any, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a flat mask; an EvaluationError for another shape, or for what is neither true nor false."""
    given = _host(mask) if hasattr(mask, "detach") else np.asarray(mask)
    if given.shape != shape:
        raise errors.EvaluationError(f"expected a mask of shape {shape}, got {given.shape}")
    kind = str(getattr(mask, "dtype", given.dtype))
    if given.size and not ("bool" in kind or ("int" in kind and np.isin(given, (0, 1)).all())):
        raise errors.EvaluationError(f"expected a mask of booleans, or of the integers 0 and 1, got {kind}")
    return given.reshape(-1).astype(np.bool_)


def _host(array: Any) -> Floats:
    """Return an array or tensor in float64, for numpy."""
    if hasattr(array, "detach"):
        array = array.detach()
        array = array.cpu().double() if array.device.type == "mps" else array.double().cpu()
        return array.numpy()
    try:
        return np.asarray(array, np.float64)
    except (TypeError, RuntimeError):  # a list of tensors with a gradient, or of a device
        return np.asarray(_frozen(array), np.float64)


def _mean(values: Any) -> float | None:
    return moments.mean(moments.of(_host(values)))


# -- which metrics a task has ----------------------------------------------------------------------

_TASKS: Final[Mapping[str, tuple[Callable[..., Any], ...]]] = {
    "generation": (bleu, rouge, sequence_consistency_score),
    "reasoning": (accuracy, step_validity),
    "rl": (discounted_reward, policy_entropy, value_variance),
}


def metrics_for(task: str) -> dict[str, Callable[..., Any]]:
    """Return the metrics of a task by name: "generation", "reasoning" or "rl"; an EvaluationError else."""
    if task.lower() not in _TASKS:
        raise errors.EvaluationError(f"expected a task ({', '.join(_TASKS)}), got {task!r}")
    return {metric.__name__: metric for metric in _TASKS[task.lower()]}
