"""The ranks that tests run on tell the test the truth: results, errors, deaths."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.gloo import RankError, Ranks, run


def total(rank, start):
    number = torch.tensor(start + rank)
    dist.all_reduce(number)
    return rank, number.item()


def fail_on_one(rank):
    if rank == 1:
        raise KeyError("broken")
    return rank


def unreadable(rank):
    return (lambda: rank) if rank else None


def never(rank):
    time.sleep(60 * rank)


def die(rank):
    os._exit(rank)


def test_ranks_answer_or_tell_what_went_wrong():
    """Results come in rank order; errors are raised with their traceback, hanging is one of them."""
    with Ranks(2) as ranks:
        assert [(0, 21), (1, 21)] == ranks.run(total, 10)
        with pytest.raises(KeyError, match="broken") as caught:
            ranks.run(fail_on_one)
        assert "on rank 1:\nTraceback" in caught.value.__notes__[0]
        with pytest.raises(RankError, match="expected an answer that pickles"):
            ranks.run(unreadable)
        assert [(0, 1), (1, 1)] == ranks.run(total, 0)
        ranks.start(fail_on_one)
        assert 0 == ranks.result(0)
        with pytest.raises(KeyError, match="broken"):
            ranks.result(1)
        ranks.start(never)
        assert None is ranks.result(0)
        with pytest.raises(RankError, match="rank 1: expected an answer to the call, in time, got none"):
            ranks.result(1, timeout=0.5)


def test_a_dead_rank_is_noticed_at_once():
    """The end of a process ends the call, not its time-out."""
    with pytest.raises(RankError, match="expected an answer to die, got the end of the process"):
        run(die)
