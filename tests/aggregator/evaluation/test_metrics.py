"""The metrics of an evaluation against brute force, against float64 numpy, and against the libraries."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import tracemalloc
from statistics import mean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aggregator.evaluation import metrics
from eventlog import errors

# -- attempts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_attempt(n):
    """For every c and k it is what counting all subsets of k attempts gives."""
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [True] * c + [False] * (n - c)
        subsets = [any(right[i] for i in chosen) for chosen in itertools.combinations(range(n), k)]
        assert mean(subsets) == pytest.approx(metrics.pass_at_k(n, c, k), abs=1e-12)


def test_pass_at_k_draws_without_replacement():
    """Four attempts, one right: 0.25, 0.5 and 1 for 1, 2 and 4; more than 4 is absent (report h14)."""
    assert [0.25, 0.5, 1.0] == [metrics.pass_at_k(4, 1, k) for k in (1, 2, 4)]
    assert metrics.pass_at_k(4, 1, 5) is None


def test_pass_at_k_holds_for_thousands_of_attempts():
    """The product neither overflows nor cancels where binomials would."""
    n, c, k = 10_000, 3, 100
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert exact == pytest.approx(metrics.pass_at_k(n, c, k), rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    """More right attempts than attempts, or no draw at all, is a mistake of the caller's."""
    with pytest.raises(
        errors.EvaluationError, match=f"expected 0 <= c <= n and k >= 1, got n={n}, c={c}, k={k}"
    ):
        metrics.pass_at_k(n, c, k)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.integers(1, 9))
def test_maj_at_k_is_what_drawing_among_the_most_frequent_answers_comes_to(answers, k):
    """Ties share the vote; more attempts than there are is absent."""
    if k > len(answers):
        assert metrics.maj_at_k(answers, "a", k) is None
        return
    counts = {answer: answers[:k].count(answer) for answer in answers[:k]}
    best = [answer for answer in counts if counts[answer] == max(counts.values())]
    assert mean(answer == "a" for answer in best) == pytest.approx(metrics.maj_at_k(answers, "a", k))


@pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda votes: [torch.tensor(v) for v in votes]])
def test_answers_may_be_tensors(kind):
    """Answers are alike when what they hold is, whatever holds it; that of the reference, too."""
    votes = [1, 1, 1, 2]
    assert [1.0, 1.0, 0.0] == [
        metrics.maj_at_k(kind(votes), right) for right in (1, torch.tensor(1), np.int64(2))
    ]
    pairs = [[1, 2], [1, 2], [3, 4]]
    assert 1.0 == metrics.maj_at_k(kind(pairs), torch.tensor([1, 2]))
    assert [0.5, 0.5] == [metrics.accuracy(kind([1, 2]), wanted) for wanted in (torch.tensor([1, 3]), [1, 3])]
    assert 2 / 3 == pytest.approx(metrics.accuracy(kind(pairs), [(1, 2), [1, 2], [3, 5]]))


def test_counts_and_scores_may_be_tensors():
    """Sums of rewards are counts, scores with a gradient are numbers; what comes out is a float."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    found = metrics.pass_at_k(torch.tensor(4), rewards.sum(), np.int64(2))
    assert (float, metrics.pass_at_k(4, 2, 2)) == (type(found), found)
    scores = [torch.tensor(1.0, requires_grad=True), torch.tensor(0.0, requires_grad=True)]
    assert [0.5, 0.5, 0.25] == [
        metrics.avg_at_k(scores),
        metrics.mean_of_stds([scores]),
        metrics.value_variance(scores),
    ]
    discounted = metrics.discounted_reward(scores, torch.tensor(0.5))
    assert (float, 1.0) == (type(discounted), discounted)
    for bad in (1.5, "2", None, rewards):
        with pytest.raises(errors.EvaluationError, match="expected c as a whole number, got"):
            metrics.pass_at_k(4, bad, 1)


def test_averages_of_attempts_take_the_first_k():
    """avg@k is the mean of k scores, of all of them without k, and absent when there are fewer."""
    assert (0.5, 1 / 3, None) == tuple(metrics.avg_at_k([1, 0, 0], k) for k in (2, None, 4))
    assert metrics.avg_at_k([]) is None


@pytest.mark.parametrize("k", [0, -1])
def test_fewer_than_one_attempt_is_refused(k):
    """The first none, or all but the last, of the attempts are a mistake of the caller's."""
    for call in (lambda: metrics.avg_at_k([1, 2, 3], k), lambda: metrics.maj_at_k("abb", "b", k)):
        with pytest.raises(
            errors.EvaluationError, match=f"expected k >= 1 attempts, or None for all, got {k}"
        ):
            call()


def test_accuracy_and_validity_are_shares():
    """Equal pairs, valid steps; nothing to judge is absent, and unequal lengths are refused."""
    assert 2 / 3 == metrics.accuracy(["a", "b", "c"], ["a", "x", "c"])
    assert metrics.accuracy([], []) is None
    with pytest.raises(errors.EvaluationError, match="expected 1 predictions, one a reference, got 2"):
        metrics.accuracy([1, 2], [1])
    assert 0.75 == metrics.step_validity([True, True, False, True])
    ascending = metrics.step_validity([1, 3, 2, 4], lambda step, before: not before or step > before[-1])
    assert 0.75 == ascending


def test_the_two_deviations_over_attempts_have_names_of_their_own():
    """Attempts [[0, 1], [1, 0]] differ within each prompt, not as a whole: 0.5 and 0 (report c25)."""
    scores = [[0, 1], [1, 0]]
    assert 0.5 == metrics.mean_of_stds(scores)
    assert 0.0 == metrics.std_of_means(scores)
    assert 0.5 == metrics.std_of_means([[0, 1], [0, 1]])
    assert [None, None] == [metrics.mean_of_stds([]), metrics.std_of_means([])]
    with pytest.raises(
        errors.EvaluationError, match=r"expected as many attempts of every prompt, got \[1, 2\]"
    ):
        metrics.std_of_means([[1], [1, 2]])


# -- texts -----------------------------------------------------------------------------------------

HYPOTHESES = ["the cat sat on the mat", "there is a dog", "nothing alike"]
REFERENCES = ["the cat is on the mat", "there was a dog here", "something else entirely"]


def test_bleu_is_sacrebleus_of_the_corpus():
    """One and several references give what sacrebleu gives, which is not the mean of the sentences."""
    import sacrebleu

    assert sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score == metrics.bleu(HYPOTHESES, REFERENCES)
    second = ["a cat sat on a mat", "there is a dog", "no"]
    several = list(zip(REFERENCES, second, strict=True))
    assert sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES, second]).score == metrics.bleu(HYPOTHESES, several)
    uneven = [[REFERENCES[0]], [REFERENCES[1], second[1]], [REFERENCES[2]]]
    streams = [REFERENCES, [None, second[1], None]]
    assert sacrebleu.corpus_bleu(HYPOTHESES, streams).score == metrics.bleu(HYPOTHESES, uneven)


def test_rouge_is_that_of_rouge_score():
    """Each kind is the mean of rouge-score's F1, of several references the best."""
    from rouge_score.rouge_scorer import RougeScorer

    kinds = ["rouge1", "rougeL"]
    scorer = RougeScorer(kinds, use_stemmer=True)
    pairs = list(zip(HYPOTHESES, REFERENCES, strict=True))
    expected = {kind: mean(scorer.score(r, h)[kind].fmeasure for h, r in pairs) for kind in kinds}
    assert expected == pytest.approx(metrics.rouge(HYPOTHESES, REFERENCES, kinds))
    assert 1.0 == metrics.rouge(["a dog"], [["a cat", "a dog"]])["rouge1"]


def test_texts_without_a_reference_are_refused():
    """Nothing is nothing; too few references, or none for one text, is a mistake."""
    assert metrics.bleu([], []) is None
    assert {} == metrics.rouge([], [])
    with pytest.raises(errors.EvaluationError, match="expected a reference for each of 2 hypotheses, got 1"):
        metrics.bleu(["a", "b"], ["a"])
    with pytest.raises(errors.EvaluationError, match=r"got none: references\[1\]"):
        metrics.rouge(["a", "b"], ["a", []])


@pytest.mark.parametrize("metric", [metrics.bleu, metrics.rouge])
def test_one_text_is_no_list_of_texts(metric):
    """A text is not taken letter by letter, and what is no text is refused."""
    one = "as a list of texts, got one text 'plain text'"
    with pytest.raises(errors.EvaluationError, match=f"expected hypotheses {one}"):
        metric("plain text", "plain text")
    with pytest.raises(errors.EvaluationError, match=f"expected references {one}"):
        metric(["plain text"], "plain text")
    for strange in (([None], ["a"]), (["a"], [None]), (["a"], [["a", 1]])):
        with pytest.raises(errors.EvaluationError, match="expected hypotheses and references as texts, got"):
            metric(*strange)


def test_one_kind_of_rouge_is_a_kind():
    """Its name alone is a list of it."""
    assert {"rougeL": 1.0} == metrics.rouge(["a b"], ["a b"], "rougeL")


def test_a_missing_library_is_named_with_its_extra():
    """Without the extra the module works, and the metric says what to install."""
    code = (
        "import sys; sys.modules['sacrebleu'] = None\n"
        "from aggregator.evaluation import metrics\n"
        "assert metrics.pass_at_k(4, 1, 2) == 0.5 and not {'torch', 'scipy'} & set(sys.modules)\n"
        "metrics.bleu(['a'], ['a'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "expected the package sacrebleu for this metric, got none" in done.stderr
    assert "pip install 'areal-metrics[eval]'" in done.stderr


# -- sequences -------------------------------------------------------------------------------------


@given(st.lists(st.floats(-10, 10), max_size=12), st.floats(0, 1))
def test_discounted_reward_is_the_sum_of_powers(rewards, gamma):
    """Horner's scheme gives the sum of gamma^(t-1) r_t."""
    expected = math.fsum(gamma**t * reward for t, reward in enumerate(rewards))
    assert expected == pytest.approx(metrics.discounted_reward(rewards, gamma), abs=1e-9)


def cosines(states):
    """Return the mean cosine of neighbours, the slow way."""
    pairs = list(itertools.pairwise(np.asarray(states, np.float64)))
    return mean(float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_consistency_is_the_mean_cosine_of_neighbours(dtype):
    """An array, a tensor of any dtype, and blocks of any sizes give the same score."""
    states = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = cosines(states.double().numpy())
    assert expected == pytest.approx(metrics.sequence_consistency_score(states), abs=1e-12)
    blocks = iter(states.split([1, 5, 0, 30, 4]))
    assert expected == pytest.approx(metrics.sequence_consistency_score(blocks), abs=1e-12)
    assert expected == pytest.approx(metrics.sequence_consistency_score(states.double().numpy()), abs=1e-12)


def test_consistency_at_its_edges():
    """Fewer than two tokens have none; a zero vector counts as 0; NaN is NaN; other shapes are refused."""
    assert metrics.sequence_consistency_score(np.ones((1, 4))) is None
    assert metrics.sequence_consistency_score(iter([])) is None
    assert 0.0 == metrics.sequence_consistency_score(np.array([[0.0, 0.0], [1.0, 0.0]]))
    assert math.isnan(metrics.sequence_consistency_score(np.array([[np.nan, 0.0], [1.0, 0.0], [1.0, 0.0]])))
    with pytest.raises(
        errors.EvaluationError, match=r"expected hidden states \(tokens, width\), got shape \(3,\)"
    ):
        metrics.sequence_consistency_score(np.ones(3))


@pytest.mark.parametrize("size", [1e200, 1e-200, 5e-324, 1.7e308])
def test_consistency_does_not_depend_on_lengths(size):
    """Vectors whose squares are no numbers have the direction they have."""
    along = np.array([[size, 0.0], [size, 0.0], [0.0, size]])
    assert pytest.approx(0.5) == metrics.sequence_consistency_score(along)
    assert pytest.approx(1.0) == metrics.sequence_consistency_score(np.full((3, 4), size))


def test_consistency_of_ten_thousand_tokens_needs_bounded_memory():
    """10 000 tokens of width 4096 (328 MB in float64) cost less than 64 MB beside the input."""
    states = np.ones((10_000, 4096), np.float32)
    tracemalloc.start()
    try:
        assert pytest.approx(1.0) == metrics.sequence_consistency_score(states)
        assert 64 << 20 > tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- policy and value ------------------------------------------------------------------------------


def entropies(logits):
    """Return the entropies of float64 logits, by scipy."""
    from scipy.special import entr, softmax

    return entr(softmax(np.asarray(logits, np.float64), axis=-1)).sum(-1)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("kind", ["numpy", "float32", "bfloat16"])
def test_entropy_is_that_of_float64(kind, scale):
    """For flat and peaked policies it is what float64 arithmetic gives for the same logits."""
    logits = scale * torch.randn(3, 5, 50, generator=torch.Generator().manual_seed(2))
    given_logits = logits.double().numpy() if kind == "numpy" else logits.to(getattr(torch, kind))
    exact = given_logits if kind == "numpy" else given_logits.double().numpy()
    expected = entropies(exact)
    assert np.allclose(expected.reshape(-1), metrics.token_entropies(given_logits), rtol=1e-9, atol=1e-12)
    assert expected.mean() == pytest.approx(metrics.policy_entropy(given_logits), rel=1e-9)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 1:3] = mask[2, 4] = True
    chosen = mask.numpy() if kind == "numpy" else mask
    assert expected[mask.numpy()].mean() == pytest.approx(
        metrics.policy_entropy(given_logits, chosen), rel=1e-9
    )


def test_entropy_is_stable():
    """Huge logits, forbidden tokens and certainty give the true entropy; gradients do not matter."""
    logits = torch.tensor([[1e4, 1e4, -math.inf, -math.inf], [1e4, 0.0, -1e4, -math.inf]], requires_grad=True)
    assert [math.log(2), 0.0] == pytest.approx(metrics.token_entropies(logits).tolist())
    assert [math.log(2), 0.0] == pytest.approx(metrics.token_entropies(logits.detach().numpy()).tolist())
    assert math.isnan(metrics.policy_entropy(np.array([[np.nan, 1.0]])))
    assert metrics.policy_entropy(logits, torch.zeros(2, dtype=torch.bool)) is None
    with pytest.raises(errors.EvaluationError, match=r"expected a mask of shape \(2,\), got \(2, 4\)"):
        metrics.policy_entropy(logits, torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["bool", "int64", "uint8", "numpy bool", "numpy int8", "list"])
@pytest.mark.parametrize("on", ["tensor", "array"])
def test_a_mask_selects_whatever_its_dtype(kind, on):
    """Booleans and the integers 0 and 1, of torch and numpy, select the same tokens and values."""
    logits = 3 * torch.randn(2, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    chosen = [[1, 1, 0, 0], [1, 0, 1, 1]]
    mask = {
        "bool": torch.tensor(chosen).bool(),
        "int64": torch.tensor(chosen),
        "uint8": torch.tensor(chosen, dtype=torch.uint8),
        "numpy bool": np.array(chosen, bool),
        "numpy int8": np.array(chosen, np.int8),
        "list": chosen,
    }[kind]
    given_logits = logits if on == "tensor" else logits.numpy()
    expected = entropies(logits.numpy())[np.array(chosen, bool)]
    assert expected.tolist() == pytest.approx(metrics.token_entropies(given_logits, mask).tolist())
    values = given_logits[..., 0]
    picked = logits.numpy()[..., 0][np.array(chosen, bool)]
    assert picked.var() == pytest.approx(metrics.value_variance(values, mask))


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (torch.tensor([1.0, 0.0]), "torch.float32"),
        (torch.tensor([0, 2]), "torch.int64"),
        (torch.tensor([0, -1], dtype=torch.int8), "torch.int8"),
        (np.array([1.0, 0.0]), "float64"),
        (["yes", "no"], "<U3"),
    ],
)
def test_what_is_no_mask_is_refused(mask, kind):
    """Weights, indices and texts select nothing: they are named, not guessed at."""
    text = f"expected a mask of booleans, or of the integers 0 and 1, got {kind}"
    with pytest.raises(errors.EvaluationError, match=text):
        metrics.policy_entropy(np.ones((2, 3)), mask)
    with pytest.raises(errors.EvaluationError, match=text):
        metrics.value_variance(torch.ones(2), mask)


def test_a_mask_has_the_shape_of_the_values():
    """As many elements in another shape would select others."""
    with pytest.raises(errors.EvaluationError, match=r"expected a mask of shape \(2, 3\), got \(3, 2\)"):
        metrics.value_variance(np.ones((2, 3)), np.ones((3, 2), bool))
    with pytest.raises(errors.EvaluationError, match=r"expected a mask of shape \(4,\), got \(3,\)"):
        metrics.explained_variance(np.ones(4), np.ones(4), np.ones(3, bool))


@pytest.mark.parametrize("value", [0.1, 5.4, 1e300, -1 / 3])
def test_what_does_not_vary_has_a_variance_of_exactly_zero(value):
    """Equal numbers vary by 0, not by what rounding leaves, so there is nothing to explain (report g14)."""
    same = [value] * 3
    assert 0.0 == metrics.value_variance(same)
    assert metrics.explained_variance([1.0, 2.0, 3.0], same) is None
    assert 0.0 == metrics.mean_of_stds([same, same])
    assert 0.0 == metrics.std_of_means([[value] * 3, [value / 2] * 3, [value / 7] * 3])


def test_variances_of_values():
    """The variance is the population's under the mask; the critic explains all, nothing, or less."""
    values, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])
    assert 1.0 == metrics.value_variance(values, mask)
    assert np.var([1.0, 3.0, 100.0]) == pytest.approx(metrics.value_variance(values))
    assert metrics.value_variance([]) is None
    returns = np.array([1.0, 2.0, 4.0])
    assert 1.0 == metrics.explained_variance(returns, returns)
    assert pytest.approx(0.0) == metrics.explained_variance(np.full(3, 7.0), returns)
    assert pytest.approx(-3.0) == metrics.explained_variance(-returns, returns)
    assert metrics.explained_variance(returns, np.ones(3)) is None
    with pytest.raises(errors.EvaluationError, match="expected 3 values, one a return, got 2"):
        metrics.explained_variance([1.0, 2.0], returns)


def test_each_task_has_its_metrics():
    """Generation, reasoning and RL have the metrics of the contract; others are named in the error."""
    assert ["bleu", "rouge", "sequence_consistency_score"] == list(metrics.metrics_for("generation"))
    assert ["accuracy", "step_validity"] == list(metrics.metrics_for("reasoning"))
    assert ["discounted_reward", "policy_entropy", "value_variance"] == list(metrics.metrics_for("RL"))
    with pytest.raises(
        errors.EvaluationError, match=r"expected a task \(generation, reasoning, rl\), got 'chess'"
    ):
        metrics.metrics_for("chess")
