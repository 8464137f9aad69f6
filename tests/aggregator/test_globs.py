"""What a key means that may stand for several names."""

import re

from hypothesis import given
from hypothesis import strategies as st

from aggregator import fits

TEXTS = st.text("ab[]!-^.\\{}*?\n", max_size=8)


@given(TEXTS, st.lists(TEXTS, max_size=3))
def test_only_stars_and_question_marks_are_special(name, keys):
    """`*` is any text, `?` one character, every other character is itself, brackets too."""
    meant = [re.escape(key).replace(r"\*", ".*").replace(r"\?", ".") for key in keys]
    assert any(re.fullmatch(each, name, re.DOTALL) for each in meant) == fits(name, keys)


@given(TEXTS)
def test_a_name_means_itself(name):
    """Whatever a name holds, as a key it means that name."""
    assert fits(name, [name])
