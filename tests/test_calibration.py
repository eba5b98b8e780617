import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_prune import prune
from swap_prune.calibration import CalibrationStream, Samples
from test_pruning import samples, trained


@settings(max_examples=40, deadline=None)
@given(
    available=st.integers(2, 60),
    held_out=st.integers(1, 10),
    reserve=st.integers(0, 30),
    stages=st.integers(1, 6),
    data=st.data(),
)
def test_held_out_samples_are_never_those_of_rows_and_differ_while_they_last(
    available, held_out, reserve, stages, data
):
    held_out = min(held_out, available - 1)
    reserve = min(max(held_out, reserve), available - 1)
    count = data.draw(st.integers(1, available - reserve))
    source = Samples((torch.arange(available), torch.zeros(available)))
    stream = CalibrationStream(source, held_out, reserve, seed=0)
    rows, held = [], []
    for stage in range(stages):
        if stage:
            stream.hold_out()
        held += stream.held_out()[0].tolist()
        rows += stream.draw(count)[0][0].tolist()
    assert not set(rows) & set(held)
    if len(held) <= reserve:
        assert len(set(held)) == len(held)
    if len(rows) <= available - reserve:
        assert len(set(rows)) == len(rows)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**63 - 1))
def test_what_users_choose_by_the_same_seed_is_not_what_is_held_out(seed):
    chosen = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:250]
    source = Samples((torch.arange(1000), torch.zeros(1000)))
    held_out = CalibrationStream(source, 200, 200, seed).held_out()[0]
    # A quarter by chance, 50, with a standard deviation of 5.5.
    assert 10 < int(torch.isin(held_out, chosen).sum()) < 90


@pytest.mark.parametrize(
    ("available", "fine_tuning", "reserve"), [(400, None, 20), (60, None, 12), (400, "default", 5)]
)
def test_every_stage_has_held_out_samples_of_its_own_unless_data_are_few_or_trained_on(
    monkeypatch, available, fine_tuning, reserve
):
    seen = []
    hold_out = CalibrationStream.hold_out

    def watched(self):
        hold_out(self)
        seen.append(self.held_out_indices.tolist())

    monkeypatch.setattr(CalibrationStream, "hold_out", watched)
    prune(
        trained(), samples(available), sparsity=0.5, stages=4, samples=20, held_out=5,
        fine_tuning=fine_tuning,
    )  # fmt: skip
    assert len({index for stage in seen for index in stage}) <= reserve
    assert len(seen) == 4
    if reserve >= 20:
        assert len({index for stage in seen for index in stage}) == 20
