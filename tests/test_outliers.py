"""Inputs unlike the others: found where they are many and the model fails on them, else kept."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_prune import InputError, data, models, noise_report, outliers, prune
from swap_prune.outliers import Screen, find, floors, largest_usual, limit, spreads
from swap_prune.run_directory import RunDirectory
from swap_prune.stages import Pruner


def test_an_input_spreads_by_all_of_its_numbers():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5, 3, 4, generator=generator) + 7
    vectors = torch.rand(5, 6, generator=generator)
    tokens = torch.randint(100, (5, 9), generator=generator)
    together = np.concatenate([images.flatten(1).numpy(), vectors.numpy()], axis=1)
    found = spreads({"image": images, "tokens": tokens, "vector": vectors})
    np.testing.assert_allclose(found, together.std(1), rtol=1e-5)
    assert spreads(tokens).tolist() == [0.0] * 5


def smooth_images(n: int, channels: int = 3, seed: int = 0) -> torch.Tensor:
    """Images (n, channels, 16, 16) whose neighbouring numbers have nearly everything in common."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(n, 1, 3, 3, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, size=16, mode="bicubic")
    grain = torch.randn(n, channels, 16, 16, generator=generator)
    return fine.repeat(1, channels, 1, 1) + 0.003 * grain


@pytest.mark.parametrize("shape", [(4, 3, 9, 7), (4, 2, 40), (4, 1, 5, 6, 7)])
def test_the_floor_is_the_emptiest_direction_of_neighbourhoods(shape):
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    windows = np.lib.stride_tricks.sliding_window_view(
        inputs.numpy(), [2] * (len(shape) - 2), axis=tuple(range(2, len(shape)))
    )
    for number, found in enumerate(floors((inputs, torch.ones(4, dtype=torch.long)))):
        one = np.moveaxis(windows[number], 0, len(shape) - 2)  # places first, then channels
        one = one.reshape(math.prod(length - 1 for length in shape[2:]), -1)
        least = np.linalg.svd(one - one.mean(0), compute_uv=False)[-1] / math.sqrt(len(one))
        assert float(found) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("deviation", [0.03, 0.1, 0.3])
def test_white_noise_raises_the_floor_to_its_own_deviation(deviation):
    torch.manual_seed(0)
    images = smooth_images(20)
    assert floors(images).max() < 0.01
    noisy = floors(images + deviation * torch.randn(images.shape))
    # The least of twelve variances, estimated from 225 neighbourhoods, is below their mean.
    assert (noisy > 0.6 * deviation).all()
    assert (noisy < 1.1 * deviation).all()


def test_inputs_without_neighbourhoods_have_no_floor():
    for inputs in (
        torch.randn(5, 30),
        torch.randint(9, (5, 3, 8, 8)),
        torch.randn(5, 3, 4, 4),  # 9 neighbourhoods of 12 numbers
        torch.randn(5, 40, 32, 32),  # 160 numbers in one
        torch.randn(5, 0, 8, 8),
        torch.randn(5, 3, 1, 1),
    ):
        assert floors(inputs).tolist() == [0.0] * 5
    missing = torch.randn(5, 3, 8, 8)
    missing[1, 0, 0, 0] = math.nan
    assert (floors(missing) > 0).tolist() == [True, False, True, True, True]


def test_weak_noise_is_found_by_the_floor_and_strong_noise_by_the_spread():
    torch.manual_seed(0)
    images, losses = smooth_images(400), torch.rand(400)
    losses[:100] += 2
    assert find(images, losses) is None
    for deviation, measure in ((0.1, "floor"), (6.0, "spread")):
        noisy = images.clone()
        noisy[:100] += deviation * torch.randn(100, 3, 16, 16)
        screen = find(noisy, losses)
        assert screen is not None
        assert screen.measure == measure
        assert not screen.keeps(noisy)[:100].any()
        assert screen.keeps(noisy)[100:].float().mean() > 0.98
        # What the model gets right is kept, as noisy as it may be.
        assert find(noisy, losses.roll(200)) is None
    assert Screen("spread", 2.0).keeps(torch.tensor([[-1.0, 1], [-3, 3]])).tolist() == [True, False]


def test_noise_of_many_strengths_is_found_by_the_measure_that_sees_more():
    torch.manual_seed(0)
    images, losses = smooth_images(400), torch.rand(400)
    losses[:100] += 2
    strengths = torch.empty(100, 1, 1, 1).uniform_(-1.6, 1.4).exp()
    images[:100] += strengths * torch.randn(100, 3, 16, 16)
    assert largest_usual(spreads(images), losses) is not None
    screen = find(images, losses)
    assert screen is not None
    assert screen.measure == "floor"
    assert (~screen.keeps(images)).tolist() == [True] * 100 + [False] * 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gray_pictures_in_three_channels_have_no_noise_but_rounding(dtype):
    torch.manual_seed(0)
    gray = smooth_images(200, channels=1).repeat(1, 3, 1, 1)
    tinted, losses = gray.clone(), torch.rand(200)
    tinted[:50] *= torch.tensor([1.1, 1.0, 0.9]).view(3, 1, 1)
    losses[:50] += 2
    assert find(tinted.to(dtype), losses) is None
    noisy = gray.clone()
    noisy[:50] += 0.1 * torch.randn(50, 3, 16, 16)
    screen = find(noisy.to(dtype), losses)
    assert screen is not None
    assert (~screen.keeps(noisy.to(dtype))).tolist() == [True] * 50 + [False] * 150


def test_missing_numbers_have_no_say_and_their_samples_stay():
    torch.manual_seed(0)
    vectors, losses = torch.randn(200, 30), torch.rand(200)
    vectors[:50] *= 10
    losses[:50] += 2
    whole = find(vectors, losses)
    assert whole is not None
    vectors[150, 3] = math.nan
    screen = find(vectors, losses)
    assert screen is not None
    assert screen.most == pytest.approx(whole.most, rel=0.1)
    assert (~screen.keeps(vectors)).tolist() == [True] * 50 + [False] * 150
    assert find(torch.full((9, 4), math.nan), torch.rand(9)) is None


@settings(max_examples=25)
@given(seed=st.integers(0, 999), n=st.integers(1, 60), factor=st.floats(1e-3, 1e3))
def test_the_limit_has_the_unit_of_the_values(seed, n, factor):
    values = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    assert limit(factor * values) == pytest.approx(factor * limit(values), rel=1e-9)
    # Half of the values are below the median, and so below the limit.
    assert (values <= limit(values)).sum() >= n / 2
    assert limit(torch.cat([values, torch.zeros(5)])) == pytest.approx(limit(values))


def test_values_that_vanish_have_no_limit():
    assert limit(torch.zeros(4)) == math.inf


def samples(share: float, ratio: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Spreads of which the first `share` of 400 are doubled, and losses that are `ratio` larger."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(0.15 * torch.randn(400, generator=generator, dtype=torch.float64))
    loss = torch.rand(400, generator=generator, dtype=torch.float64)
    odd = round(share * 400)
    spread[:odd] = 2.5 + 0.1 * torch.rand(odd, generator=generator, dtype=torch.float64)
    loss[:odd] *= ratio
    return spread, loss


@settings(max_examples=25)
@given(seed=st.integers(0, 999), share=st.sampled_from([0.03, 0.1, 0.25, 0.45]))
def test_a_second_group_that_the_model_fails_on_is_found(seed, share):
    spread, loss = samples(share, 6.0, seed)
    most = largest_usual(spread, loss)
    assert most is not None
    odd = round(share * 400)
    assert (spread[:odd] > most).all()
    assert (spread[odd:] > most).sum() <= 4


@pytest.mark.parametrize(("share", "ratio"), [(0.0, 1.0), (0.01, 9.0), (0.25, 1.0), (0.25, 0.2)])
def test_few_outliers_or_such_as_the_model_knows_are_kept(share, ratio):
    assert largest_usual(*samples(share, ratio)) is None


def test_losses_may_be_negative():
    spread, loss = samples(0.25, 1.0)
    loss[:100] += 0.2  # a fifth of the others' size, and then twice as much as it is
    assert largest_usual(spread, loss - 1.5) is None
    loss[:100] += 2.0
    assert largest_usual(spread, loss - 1.5) is not None


def test_equal_inputs_have_no_outliers():
    assert largest_usual(torch.ones(50), torch.rand(50)) is None
    assert largest_usual(torch.zeros(50), torch.rand(50)) is None


# --- in a run -----------------------------------------------------------------------------------


SETTINGS = {
    "sparsity": 0.8,
    "method": "ewr",
    "stages": 3,
    "samples": 40,
    "samples_per_row": 4,
    "held_out": 100,
}
# So much that every noisy input is beyond the clean ones.
LOUD = {"kind": "input", "fraction": 0.25, "level": 5.0}


def run(method: str = "ewr", calibration=None, directory=None, **changes):
    return prune(
        models.pretrained("digits"),
        data.load("digits").train if calibration is None else calibration,
        directory=directory,
        **{**SETTINGS, "method": method, **changes},
    )


@pytest.mark.parametrize("method", ["lr", "ewr"])
def test_noisy_inputs_are_left_out_in_whole_rows(method):
    screened = run(method, noise=LOUD, screen=True)
    # A quarter of what is drawn, but for what spreads no further than a clean one; four are a row.
    first, *later = [line["left_out_samples"] for line in screened.history]
    assert first in (32, 36, 40)
    assert all(40 <= count <= 56 and count % 4 == 0 for count in later)
    kept = run(method, noise=LOUD, screen=False)
    assert "left_out_samples" not in kept.history[0]
    clean = run(method, screen=True)
    assert [line["left_out_samples"] for line in clean.history] == [0, 0, 0]
    unscreened = run(method, screen=False)
    for name, value in clean.model.state_dict().items():
        assert torch.equal(value, unscreened.model.state_dict()[name])


def test_others_are_drawn_for_those_left_out(monkeypatch):
    taken, gradients = [], Pruner._gradients

    def counted(self, batch, loss, indices, *progress):
        assert len(batch[1]) == len(indices) == len(indices.unique())
        taken.append(len(indices))
        return gradients(self, batch, loss, indices, *progress)

    monkeypatch.setattr(Pruner, "_gradients", counted)
    history = run(noise=LOUD).history
    first, *later = taken[-3:]  # before them the noise is calibrated
    assert first == 160 - history[0]["left_out_samples"]
    assert all(150 <= count <= 160 for count in later)
    # Of 280 samples 100 are held out, and no more than the other 180 can be drawn.
    few = run(noise=LOUD, calibration=data.load("digits").train[:280]).history
    assert all(line["left_out_samples"] for line in few)
    assert taken[-2:] == [180 - line["left_out_samples"] for line in few[1:]]


@pytest.mark.parametrize(("saved", "measure"), [(1, "spread"), (2, "floor")])
def test_a_resumed_run_leaves_out_the_same(tmp_path, monkeypatch, saved, measure):
    monkeypatch.setattr(outliers, "MEASURES", {measure: outliers.MEASURES[measure]})
    whole, save = run(noise=LOUD), RunDirectory.save_step
    assert all(line["left_out_samples"] for line in whole.history)

    def save_first(directory, step):
        if step.number > saved:
            raise KeyboardInterrupt
        save(directory, step)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_step", save_first)
        with pytest.raises(KeyboardInterrupt):
            run(noise=LOUD, directory=tmp_path)
    resumed = run(noise=LOUD, directory=tmp_path)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])


def test_what_is_left_out_of_the_users_own_data_is_said():
    images, labels = data.load("digits").train[:]
    broken = images.clone()
    generator = torch.Generator().manual_seed(0)
    broken[::5] += 3 * torch.randn(broken[::5].shape, generator=generator)
    with pytest.warns(UserWarning, match=r"\d+ of 100 held-out inputs are far noisier than"):
        run(calibration=(broken, labels))
    report = noise_report(models.pretrained("digits"), (broken, labels))
    assert 80 <= report.outlying_inputs <= 120  # a fifth of 500
    assert f"The inputs of {report.outlying_inputs} samples are far noisier" in str(report)
    assert noise_report(models.pretrained("digits"), (images, labels)).outlying_inputs == 0


def test_the_screen_is_ewrs_own_and_needs_held_out_samples():
    assert [run(method).settings["screen"] for method in ("lr", "ewr")] == [False, True]
    with pytest.raises(InputError, match="screen=True needs held-out samples"):
        run("lr", screen=True, held_out=0, damping=1.0, first_order=0.0, metric=0.0, block_size=0)
    with pytest.raises(InputError, match="screen='yes' must be True or False"):
        run(screen="yes")
