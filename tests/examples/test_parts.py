"""The parts of the example that are pure: its task, its batches, its advantages and its loss."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

TINY_GRPO = Path(__file__).parents[2] / "examples/tiny_grpo"
MODULES = ("actor", "config", "policy", "task", "trajectory")


@pytest.fixture
def parts(monkeypatch):
    """The example's modules, under their own names for the time of a test."""
    monkeypatch.syspath_prepend(TINY_GRPO)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {name: import_module(name) for name in MODULES}


def test_an_epoch_holds_every_training_problem_once_and_none_that_is_held_out(parts):
    """The batches of an epoch are disjoint; each epoch has another order; the same step is the same batch."""
    dataset = parts["task"].Dataset(largest=4, held_out=5, batch_size=10, seed=3)
    epochs = [[problem for step in steps for problem in dataset.batch(step)] for steps in ((0, 1), (2, 3))]
    assert 2 == dataset.steps_per_epoch
    assert set(dataset.training) == set(epochs[0]) == set(epochs[1])
    assert set() == set(dataset.training) & set(dataset.evaluation)
    assert epochs[0] != epochs[1]
    assert dataset.batch(3) == parts["task"].Dataset(largest=4, held_out=5, batch_size=10, seed=3).batch(3)


def test_a_batch_tells_prompts_answers_and_padding_apart(parts):
    """The loss mask holds what the policy wrote, the attention mask also what it read, none the padding."""
    task, trajectory = parts["task"], parts["trajectory"]
    long, short = trajectory.Trajectory(reward=1.0), trajectory.Trajectory()
    long.read(task.encode("1+2="))
    for token in task.encode("3."):
        long.write(token, -0.5)
    short.read(task.encode("1+2="))
    short.write(task.PAD, -2.0)  # nothing keeps a policy from writing it
    batch = trajectory.Batch.of([long, short])
    assert [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0]] == batch.loss_mask.int().tolist()
    assert [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]] == batch.attention_mask.int().tolist()
    assert [True, False] == batch.ended.tolist()
    assert [-0.5, -2.0] == batch.logp[:, 4].tolist()
    assert [0.0] == batch[torch.tensor([1])].reward.tolist()


def test_group_advantages_compare_only_answers_to_the_same_prompt(parts):
    """Each group has mean 0 and deviation 1; a group that agrees teaches nothing."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    advantages = parts["actor"].group_advantages(rewards, 4)
    assert [0.866, -0.866, 0.866, -0.866] == pytest.approx(advantages[:4].tolist(), abs=1e-3)
    assert [0.0] * 4 == advantages[4:].tolist()


def test_grpo_loss_clips_the_ratio_and_bounds_what_a_bad_token_can_cost(parts):
    """Above 1 + eps a good token stops counting; a bad one counts fully up to c_clip, and no more."""
    ratio, advantage = torch.tensor([1.0, 1.5, 1.5, 5.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = parts["actor"].grpo_loss(ratio.log(), torch.zeros(4), advantage, eps_clip=0.2, c_clip=3.0)
    assert [-1.0, -1.2, 1.5, 3.0] == pytest.approx(loss.loss.tolist())
    assert [False, True, False, False] == loss.clipped.tolist()
    assert [False, False, False, True] == loss.dual_clipped.tolist()
    assert ratio.tolist() == pytest.approx(loss.importance_weight.tolist())


def test_the_score_of_a_token_ignores_what_follows_it(parts):
    """Padding and later tokens change neither log-probability nor entropy; the first token has none."""
    policy = parts["policy"].Policy(parts["config"].Config())
    tokens = torch.tensor([parts["task"].encode("12+7=19.")])
    logp, entropy = policy.score(tokens)
    padded_logp, padded_entropy = policy.score(torch.nn.functional.pad(tokens, (0, 3)))
    assert torch.allclose(logp, padded_logp[:, :8], atol=1e-6)
    assert torch.allclose(entropy, padded_entropy[:, :8], atol=1e-6)
    assert [0.0, 0.0] == [logp[0, 0].item(), entropy[0, 0].item()]
