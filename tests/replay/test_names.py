"""Names that a tracker keeps to itself, forbids or finds too long."""

from __future__ import annotations

import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replay.backends.names import Names

RESERVED = {"step", "__x"}


def names(limit: int | None = None) -> Names:
    """Return a tracker's names with all kinds of rules."""
    return Names("test", forbidden=r"[.\x00-\x1f]|^ | $", reserved=RESERVED.__contains__, limit=limit)


TEXTS = (
    st.text(alphabet="~ .;\n2eax_/", min_size=1, max_size=40)
    | st.text(min_size=1)
    | st.sampled_from([*RESERVED])
)


@given(st.lists(TEXTS, unique=True))
@example(["step", "~step", "~~step", "~", "~~", "~2e;", "."])
def test_names_can_be_read_back_and_do_not_meet(given_names: list[str]) -> None:
    """Every name comes back as it was, so no two have met (reports e6, e7)."""
    mapped = names()
    there = [mapped.to(name) for name in given_names]
    assert given_names == [names().back(name) for name in there]
    assert not RESERVED & set(there)


@given(st.lists(TEXTS, unique=True), st.text(alphabet="~.2e", min_size=60, max_size=64))
def test_shortened_names_do_not_meet(given_names: list[str], long: str) -> None:
    """A name too long is cut and told from every other by its hash (report e6)."""
    mapped = names(limit=30)
    whole = list(dict.fromkeys([*given_names, long, long + "x", *map(mapped.to, [long])]))
    there = [mapped.to(name) for name in whole]
    assert len(whole) == len(set(there))
    assert 30 >= max(map(len, there))
    assert whole == [mapped.back(name) for name in there]


def test_a_shortened_name_is_always_the_same() -> None:
    """The hash depends on nothing but the name."""
    assert names(limit=40).to("x" * 600) == names(limit=40).to("x" * 600)
    assert "x" * 23 + "~" == names(limit=40).to("x" * 600)[:24]


def test_that_names_change_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first changed name is logged as it is, the others are only counted (report e7)."""
    mapped = names()
    with caplog.at_level(logging.INFO, "areal_metrics.replay"):
        assert {"~step": 1.0, "my~2e;loss": 2.0, "fine": 3.0} == mapped.row(
            {"step": 1.0, "my.loss": 2.0, "fine": 3.0}
        )
        mapped.row({"step": 1.0})
    assert 1 == len(caplog.records)
    assert {"step": "~step", "my.loss": "my~2e;loss"} == mapped.renamed
