"""What is said of the sequences of masks: checked at the call, kept in the payload."""

import array
import collections
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eventlog import Recorder, arrays, drain, encode
from eventlog.batch import Batch, parted
from eventlog.errors import RecordingError, RecordingTypeError


def payload(recorder):
    """Return the payload rows of what was recorded, by the position of their record."""
    frame = drain([recorder]).frame
    rows = [row for message in encode.payload(frame) for row in message.batch().to_pylist()]
    return sorted(rows, key=lambda row: row["record_id"])


@given(st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=9).filter(any))
def test_a_packed_mask_keeps_what_each_sequence_selects(sequences):
    """The counts are those of the sequences one by one, empty sequences included."""
    bits = [bit for sequence in sequences for bit in sequence]
    bounds = np.cumsum([0, *map(len, sequences)])
    recorder = Recorder()
    recorder.denominator({"m": np.array(bits)}, about={"cu_seqlens": bounds})
    recorder.stat("m", {"x": np.arange(len(bits), dtype=np.float32)})
    mask, x = payload(recorder)
    expected = [sum(sequence) for sequence in sequences]
    if all(len(sequence) == 1 for sequence in sequences):  # one element each: the mask says it
        assert mask["selected"] is None
    else:
        assert expected == mask["selected"]
        cuts = np.split(np.array(x["values32"]), np.cumsum(expected)[:-1])
        wanted = [np.arange(lo, hi)[bits[lo:hi]] for lo, hi in itertools.pairwise(bounds)]
        assert [part.tolist() for part in wanted] == [part.tolist() for part in cuts]


@pytest.mark.parametrize(
    "bounds",
    [
        [0, 2, 3, 6],
        (0, 2, 3, 6),
        np.array([0, 2, 3, 6]),
        np.array([0, 2, 3, 6], np.uint8),
        torch.tensor([0, 2, 3, 6], dtype=torch.int32),
        torch.tensor([0, 2, 3, 6]),
        array.array("q", [0, 2, 3, 6]),
        collections.deque([0, 2, 3, 6]),
    ],
)
def test_bounds_are_taken_as_any_integers(bounds):
    """Lists, arrays and tensors of any integer type say where sequences lie, in a batch of one row too."""
    recorder = Recorder()
    mask = torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.bool)
    recorder.denominator({"flat": mask, "row": mask[None]}, about={"cu_seqlens": bounds})
    assert [[1, 1, 2], [1, 1, 2]] == [row["selected"] for row in payload(recorder)]


def test_a_range_is_a_sequence_of_integers():
    """It says where sequences of one length lie, and which samples they are."""
    recorder = Recorder()
    about = {"cu_seqlens": range(0, 7, 3), "sample_ids": range(2)}
    recorder.denominator({"m": torch.ones(6, dtype=torch.bool)}, about=about)
    (row,) = payload(recorder)
    assert ([3, 3], ["0", "1"]) == (row["selected"], row["sample_ids"])
    for wrong in (b"\0\3\6", bytearray(b"\0\3\6")):
        with pytest.raises(RecordingTypeError, match="expected cu_seqlens"):
            Batch.read(cu_seqlens=wrong)
        with pytest.raises(RecordingTypeError, match="expected sample_ids"):
            Batch.read(sample_ids=wrong)


def test_a_mask_with_one_element_a_sequence_stands_beside_packed_ones():
    """Token masks and sequence masks of one packed batch are registered together."""
    recorder = Recorder()
    tokens, sequences = torch.ones(6, dtype=torch.bool), torch.tensor([True, False])
    about = {"cu_seqlens": torch.tensor([0, 4, 6]), "sample_ids": ["a", 7]}
    recorder.denominator({"n_tokens": tokens, "n_seqs": sequences}, about=about)
    of_tokens, of_sequences = payload(recorder)
    assert ([4, 2], ["a", "7"]) == (of_tokens["selected"], of_tokens["sample_ids"])
    assert (None, b"\x01", ["a", "7"]) == tuple(of_sequences[k] for k in ("selected", "mask", "sample_ids"))


@pytest.mark.parametrize("held", [list, torch.tensor])
def test_as_many_tokens_as_sequences_are_packed_all_the_same(held):
    """Where a sequence is empty, a mask can have an element for each without being one a sequence."""
    recorder = Recorder()
    recorder.denominator({"tokens": np.ones(2, bool)}, about={"cu_seqlens": held([0, 2, 2])})
    assert [[2, 0]] == [row["selected"] for row in payload(recorder)]


def test_rows_are_the_sequences_without_bounds():
    """Of a padded batch each row is a sequence, which sample ids may name; tags go with the mask's record."""
    recorder = Recorder()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    recorder.denominator({"m": mask}, about={"sample_ids": np.array([3, 4]), "tags": {"modality": "text"}})
    recorder.denominator({"plain": mask})
    drained = drain([recorder])
    tags = encode.records(drained.frame, encode.Texts()).batch()["tags"].to_pylist()
    assert ({"modality": "text"}, None) == (json.loads(tags[0]), tags[1])
    (batch,) = (message.batch() for message in encode.payload(drained.frame))
    assert [["3", "4"], None] == batch["sample_ids"].to_pylist()
    assert [[2, 1], [2, 1]] == batch["selected"].to_pylist()


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"cu_seqlens": [1, 6]}, r"expected cu_seqlens .*, got 1 as the first"),
        ({"cu_seqlens": [0, 4, 3, 6]}, r"expected cu_seqlens .*, got 3 behind 4 at 2"),
        ({"cu_seqlens": [0, 5]}, r"cu_seqlens that end at 6, the number of elements of 'a/m' .*, got 5"),
        ({"cu_seqlens": [0, 9]}, r"end at 6, .* \(or a mask with one element for each of the 1 sequences\)"),
        ({"cu_seqlens": [0]}, r"in one dimension\), got shape \(1,\)"),
        ({"cu_seqlens": torch.zeros(2, 2).int()}, r"got shape \(2, 2\)"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, r"expected cu_seqlens \(integers .*\), got float32"),
        ({"cu_seqlens": 6}, r"expected cu_seqlens .*, got a int"),
        ({"cu_seqlens": "06"}, r"expected cu_seqlens .*, got a str"),
        ({"sample_ids": ["x"]}, r"expected 2 sample ids \(one a sequence\) for 'a/m', got 1"),
        ({"sample_ids": ["x", "y"], "cu_seqlens": [0, 1, 2, 6]}, r"expected 3 sample ids"),
        ({"sample_ids": "xy"}, r"expected sample_ids as a list of str or int, got str"),
        ({"sample_ids": [1.5, 2]}, r"list of str or int, got float 1.5 in it"),
        ({"sample_ids": ["", "b"]}, r"expected a non-empty sample id, got ''"),
        ({"tags": ["text"]}, r"expected tags as a dict, got list"),
        ({"tags": {"a": object()}}, r"expected tags that JSON can hold, got \{'a'"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_recorded(about, message):
    """Wrong bounds, ids and tags say expected, got and key; no mask of the call is registered."""
    recorder = Recorder()
    with recorder.scope("a"), pytest.raises(RecordingError, match=message):
        recorder.denominator({"m": torch.ones(2, 3, dtype=torch.bool)}, about=about)
    assert len(drain([recorder]).frame) == 0


def test_a_bool_tensor_under_the_name_of_an_option_is_a_mask():
    """A mask may be called as an option is; what is no bool tensor is the option."""
    mask, bounds = torch.ones(3, dtype=torch.bool), torch.tensor([0, 3])
    masks, about = parted({"m": mask}, {"cu_seqlens": bounds, "sample_ids": mask, "tags": mask.numpy()})
    assert (["m", "sample_ids", "tags"], ["cu_seqlens"]) == (list(masks), list(about))


def test_bounds_on_a_device_are_read_at_export(monkeypatch):
    """Bounds on a device are checked only when the window is drained: wrong ones warn, the mask is kept."""
    monkeypatch.setattr(arrays, "on_host", lambda value: not isinstance(value, torch.Tensor))
    recorder = Recorder()
    mask = torch.tensor([1, 0, 1, 1], dtype=torch.bool)
    recorder.denominator({"good": mask}, about={"cu_seqlens": torch.tensor([0, 1, 4], dtype=torch.int32)})
    recorder.denominator({"seqs": mask[:2]}, about={"cu_seqlens": torch.tensor([0, 1, 4])})
    recorder.denominator({"bad": mask}, about={"cu_seqlens": torch.tensor([0, 3, 2, 4])})
    with pytest.warns(UserWarning, match="got 2 behind 3 at 2; the mask is kept without its sequences"):
        drained = drain([recorder])
    (batch,) = (message.batch() for message in encode.payload(drained.frame))
    assert [[1, 2], None, None] == batch["selected"].to_pylist()
    assert [3, 1, 3] == [int(row[5]) for row in drained.rows]


def test_a_mask_without_dimensions_is_one_sequence():
    """A single truth is a mask of one element, of one sequence."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor(True)}, about={"sample_ids": ["only"]})
    recorder.stat("m", {"x": torch.tensor(2.5)})
    mask, x = payload(recorder)
    assert (["only"], None, [2.5]) == (mask["sample_ids"], mask["selected"], x["values32"])
    assert Batch.read().selected(np.array([1], np.uint8), ()) is None


def test_bounds_beyond_int64_are_refused():
    """Running totals that int64 cannot hold are refused as any other wrong ones."""
    with pytest.raises(RecordingError, match=r"expected cu_seqlens .*, got ndarray, which cannot be read"):
        Batch.read(cu_seqlens=np.array([0, 2**64 - 1], np.uint64))
