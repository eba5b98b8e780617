import json
import math
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from swap_prune import InputError, NoiseReport, data, models, noise_report, prune
from swap_prune.calibration import Samples
from swap_prune.cli import main
from swap_prune.gradients import DenseGradients
from swap_prune.machine import affordable_memory, check_memory
from swap_prune.noise import LabelNoise
from swap_prune.noise_report import (
    count_orthogonal,
    count_outliers,
    effective_ranks,
    half_agreement,
    measure,
    opposition,
    recommend,
    scaled_gram,
    share_of_largest,
    tail_index,
)
from swap_prune.settings import Settings, resolve

N, P = 60, 2000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(n: int = N, p: int = P, rank: int = 5, seed: int = 0) -> torch.Tensor:
    """Clean rows (n, p): a common direction, and variation within a few others."""
    generator = seeded(seed)
    basis = torch.linalg.qr(torch.randn(p, rank + 1, generator=generator, dtype=torch.float64)).Q.T
    return 2 * basis[0] + torch.randn(n, rank, generator=generator).double() @ basis[1:] * 0.5


def gram(matrix: torch.Tensor) -> torch.Tensor:
    return matrix @ matrix.T


def report_on(matrix: torch.Tensor, available: int = 5000, **changes: object) -> NoiseReport:
    return replace(measure(gram(matrix), matrix.shape[1], 1, available, seeded()), **changes)


# --- the measures against other ways to compute them --------------------------------------------


def test_effective_rank_is_that_of_the_singular_values():
    G = torch.randn(30, 200, generator=seeded(), dtype=torch.float64)
    G *= torch.logspace(0, -3, 30, dtype=torch.float64)[:, None]
    share = torch.linalg.svdvals(G).square()
    share /= share.sum()
    rank, participation = effective_ranks(gram(G))
    assert rank == pytest.approx(math.exp(-sum(v * math.log(v) for v in share.tolist())))
    assert participation == pytest.approx(1 / sum(v * v for v in share.tolist()))
    assert participation <= rank <= 30


def test_equal_orthogonal_rows_have_full_rank():
    assert effective_ranks(3 * torch.eye(8).double()) == pytest.approx((8, 8))


@pytest.mark.parametrize("n", [2, 7, 40])
def test_halves_agree_as_those_of_the_rows_do(n):
    G = rows(n) + torch.randn(n, P, generator=seeded(1)).double() * 0.1
    order = torch.rand(20, n, generator=seeded(5)).argsort(dim=1)
    cosines = [
        torch.cosine_similarity(G[o[: n // 2]].mean(0), G[o[n // 2 : n // 2 * 2]].mean(0), dim=0)
        for o in order
    ]
    expected = float(torch.stack(cosines).mean())
    assert half_agreement(gram(G), seeded(5)) == pytest.approx(expected, abs=1e-12)


def test_signal_to_noise_and_samples_needed_are_those_of_the_simulation():
    # Signal of power 1, noise of power 100 a row, 200 rows: 2 in the mean of all.
    p, power = 5000, 100.0
    signal = torch.zeros(p, dtype=torch.float64)
    signal[0] = 1
    noise = torch.randn(200, p, generator=seeded(), dtype=torch.float64) * math.sqrt(power / p)
    report = report_on(signal + noise)
    assert report.signal_to_noise == pytest.approx(2, rel=0.25)
    needed = report.samples_per_row_needed
    assert needed == pytest.approx(9, abs=2)
    better = report_on(signal + noise / math.sqrt(needed))
    assert better.agreement == pytest.approx(0.9, abs=0.02)


def test_the_rows_against_the_others_are_those_of_brute_force():
    G = torch.randn(25, 40, generator=seeded(), dtype=torch.float64)
    against = torch.zeros(25, dtype=torch.bool)
    for i in range(25):
        others = torch.cat([G[:i], G[i + 1 :]]).mean(dim=0)
        against[i] = torch.cosine_similarity(G[i], others, dim=0) < 0
    share, weighted = opposition(gram(G))
    assert share == pytest.approx(float(against.double().mean()))
    norms = G.norm(dim=1)
    assert weighted == pytest.approx(float(norms[against].sum() / norms.sum()))


def test_explained_shares_are_those_of_ridge_fits():
    # A row that the others explain nothing of, 4%, and a quarter.
    G = rows(20, rank=3)
    extra = torch.zeros(1, P, dtype=torch.float64)
    extra[0, -1] = 1
    for mix, expected in ((0.0, 1), (0.2, 1), (0.5, 0)):
        row = mix * G.mean(0) / G.mean(0).norm() + math.sqrt(1 - mix**2) * extra
        both = torch.cat([G, row])
        unit = both / both.norm(dim=1, keepdim=True)
        target, others = unit[-1], unit[:-1]
        ridge = torch.linalg.solve(gram(others) + 0.01 * torch.eye(20), others @ target)
        explained = float((others @ target) @ ridge)
        assert (explained < 0.1) == bool(expected)
        assert count_orthogonal(gram(both), P) == expected


def test_hill_finds_the_tail_of_a_pareto():
    uniform = torch.rand(20_000, generator=seeded(), dtype=torch.float64)
    for index in (1.0, 3.0):
        assert tail_index(uniform ** (-1 / index)) == pytest.approx(index, rel=0.1)
    assert tail_index(torch.ones(100)) == math.inf
    assert tail_index(torch.ones(19)) is None


def test_share_of_the_largest():
    norms = torch.ones(100, dtype=torch.float64)
    norms[17] = 10
    assert share_of_largest(norms, 0.01) == pytest.approx(100 / 199)
    assert share_of_largest(norms, 0.1) == pytest.approx(109 / 199)
    assert share_of_largest(torch.zeros(3), 0.1) is None


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e25])
def test_the_gram_matrix_of_any_magnitude(scale):
    G = torch.randn(6, 50, generator=seeded(), dtype=torch.float64)
    G *= torch.tensor([1e-8, 1, 1, 1, 1, 1e8])[:, None]
    G[2] = 0
    single = (G * scale).float()
    expected = gram(single.double())
    torch.testing.assert_close(scaled_gram(DenseGradients(single)), expected, rtol=1e-5, atol=0)


# --- planted noise is found, and clean rows are clean -------------------------------------------


def test_clean_rows_are_clean():
    report = report_on(rows())
    assert (report.outliers, report.orthogonal, report.vanishing) == (0, 0, 0)
    assert report.opposed == report.opposed_weight == 0
    assert report.agreement > 0.95
    assert report.effective_rank < 7


def test_planted_outliers_are_counted():
    G = rows()
    G[[3, 30, 50]] *= 100
    assert report_on(G).outliers == 3
    assert report_on(G).largest_10_percent > 0.99
    # Broad norms, over orders of magnitude, are no outliers by themselves.
    broad = torch.exp(3 * torch.randn(1000, generator=seeded(), dtype=torch.float64))
    assert count_outliers(broad) <= 3


def test_planted_orthogonal_rows_are_counted():
    G = rows()
    planted = [0, 11, 22, 33]
    G[planted] = torch.randn(4, P, generator=seeded(9), dtype=torch.float64)
    assert count_orthogonal(gram(G), P) == 4
    # With few weights a row of chance is explained by chance, which is told from a fit ...
    G = rows(p=200)
    G[planted] = torch.randn(4, 200, generator=seeded(9), dtype=torch.float64)
    assert count_orthogonal(gram(G), 200) == 4
    # ... as long as chance doesn't explain everything.
    full = torch.randn(60, 80, generator=seeded(), dtype=torch.float64)
    assert count_orthogonal(gram(full), 80) is None


def test_planted_flipped_rows_are_found():
    G = rows()
    G[:6] *= -1
    report = report_on(G)
    assert report.opposed == pytest.approx(0.1)
    assert report.opposed_weight == pytest.approx(0.1, abs=0.03)


def test_noise_without_a_signal_does_not_agree():
    G = torch.randn(N, P, generator=seeded(2), dtype=torch.float64)
    report = report_on(G - G.mean(dim=0))
    assert report.agreement < 0
    assert (report.signal_to_noise, report.samples_per_row_needed) == (0, None)


# --- degenerate input ---------------------------------------------------------------------------


def assert_valid(report: NoiseReport) -> None:
    for field in fields(report):
        value = getattr(report, field.name)
        assert not (isinstance(value, float) and math.isnan(value)), field.name
    json.dumps(report.describe(), allow_nan=False)
    assert "nan" not in str(report)
    assert report.reasons


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("n", [1, 2, 3, 40])
@pytest.mark.parametrize("kind", ["different", "identical", "zero"])
def test_degenerate_data_give_a_valid_report_and_usable_settings(n, kind):
    model = net()
    x = torch.randn(n, 4, generator=seeded())
    if kind == "identical":
        x = x[:1].expand(n, 4).clone()
    loss = (lambda output, _: 0 * output.sum()) if kind == "zero" else None
    labels = torch.zeros(n, dtype=torch.int64)
    report = noise_report(model, (x, labels), loss=loss)
    assert_valid(report)
    assert report.rows == report.available == n
    if kind == "identical":
        assert report.outliers == 0
        assert report.effective_rank == pytest.approx(1, abs=1e-3)
        assert report.agreement is None if n == 1 else report.agreement == pytest.approx(1)
    if kind == "zero":
        assert report.vanishing == n
        assert report.effective_rank is report.agreement is report.orthogonal is None
        assert report.recommendation["method"] == "magnitude"
    prune(model, (x, labels), sparsity=0.5, loss=loss, stages=1, **report.recommendation)


def test_a_model_that_says_nothing_is_no_contamination():
    model = net()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    labels = torch.randint(3, (300,), generator=seeded())
    report = noise_report(model, (torch.randn(300, 4, generator=seeded()), labels))
    assert_valid(report)
    # Only the last bias would have a gradient, and biases aren't pruned.
    assert report.vanishing == 300
    assert report.contamination_gain == pytest.approx(0, abs=1e-6)


# --- the recommendation -------------------------------------------------------------------------

CLEAN_LABELS = {"classes": 10, "contamination": 0.001, "contamination_gain": 0.1}


@pytest.mark.parametrize(
    ("changes", "expected", "said"),
    [
        ({}, ("ewr", 1), "0.001"),
        ({"contamination": 0.2, "contamination_gain": 50.0}, ("ewr", 1), "0.200"),
        ({"contamination": 0.2, "contamination_gain": 0.5}, ("ewr", 1), "may be chance"),
        ({"contamination": None, "contamination_gain": None}, ("ewr", 1), "this loss"),
        ({"agreement": 0.4}, ("ewr", 16), "agree to 0.40"),
        ({"tail_index": 1.3}, ("ewr", 16), "tail index of the row norms is 1.30"),
        ({"tail_index": 1.3, "available": 5000}, ("ewr", 4), "1.30"),
        ({"agreement": 0.4, "available": 1200}, ("ewr", 1), "not as fewer rows of several"),
        ({"available": 100}, ("ewr", 1), "80 rows"),
        ({"available": 49}, ("wf", 1), "49 calibration samples are too few"),
        ({"available": 1}, ("magnitude", 1), "one calibration sample"),
    ],
)
def test_each_rule(changes, expected, said):
    report = report_on(rows(), available=100_000, tail_index=4.0, **CLEAN_LABELS)
    chosen, reasons = recommend(replace(report, **changes))
    assert (chosen["method"], chosen["samples_per_row"]) == expected
    assert said in " ".join(reasons)
    available = changes.get("available", 100_000)
    assert chosen["samples"] * chosen["samples_per_row"] + chosen["held_out"] <= available


@pytest.mark.parametrize(("page", "fits"), [(2000, 150), (1000, 31)])
def test_rows_that_memory_can_not_hold_are_not_recommended(monkeypatch, page, fits):
    report = report_on(rows(), available=100_000)
    monkeypatch.setattr("os.sysconf", lambda name: page)
    chosen, reasons = recommend(report)
    assert chosen["samples"] == fits
    assert f"memory holds {fits} rows" in " ".join(reasons)
    # With the rows that ewr remembers, for which `prune` wants room too.
    resolved = resolve(Settings(sparsity=0.5, **chosen), 100_000)
    check_memory(resolved.samples, P, affordable_memory(resolved.samples, P))


# --- end to end ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    train = Samples(data.load("digits").train)
    return models.pretrained("digits"), train.read(torch.arange(len(train)))


def test_digits(digits):
    model, batch = digits
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    state = torch.get_rng_state()
    report = noise_report(model, batch, seed=1)
    assert_valid(report)
    assert (report.rows, report.weights, report.available) == (500, 17024, 1297)
    assert report.contamination < 0.02
    assert 0 < report.observed_error < 0.05
    assert report.recommendation["method"] == "ewr"
    assert report == noise_report(model, batch, seed=1)
    assert report != noise_report(model, batch, seed=2)
    # Nothing of the caller's has changed.
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()


@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_noisy_labels_of_digits_are_found(digits, fraction):
    model, batch = digits
    noisy = LabelNoise(fraction).samples(batch, seeded(12))
    report = noise_report(model, noisy, samples=1000)
    # A blind label is right one time in ten.
    assert report.contamination == pytest.approx(fraction * 10 / 9, abs=0.03)
    assert report.observed_error > report.expected_error + fraction / 2
    assert report.recommendation["method"] == "ewr"
    assert "contamination" in report.reasons[0]


def test_samples_a_row_and_selected_weights(digits):
    model, batch = digits
    single = noise_report(model, batch, samples=100)
    report = noise_report(model, batch, samples=100, samples_per_row=10, exclude=["fc1.weight"])
    assert (report.rows, report.samples_per_row) == (100, 10)
    assert report.weights < single.weights
    assert report.max_to_median < single.max_to_median
    assert noise_report(model, batch, samples_per_row=10).rows == 129


def test_another_loss_has_no_labels():
    batch = torch.randn(30, 4, generator=seeded()), torch.randn(30, 3, generator=seeded(1))
    report = noise_report(net(), batch, loss=nn.functional.mse_loss)
    assert_valid(report)
    assert report.contamination is report.observed_error is None
    assert "contamination" not in str(report).split("recommended")[0]


TASK = ["noise-report", "--model", "digits", "--data", "digits"]


def test_the_command_line(capsys, digits):
    assert main([*TASK, "--samples", "60"]) == 0
    text = capsys.readouterr().out
    assert text.strip() == str(noise_report(*digits, samples=60))
    for words in ("effective rank", "agreement between halves", "recommended: method="):
        assert words in text
    given = ["--samples", "40", "--samples-per-row", "2", "--seed", "3", "--exclude", "fc1.weight"]
    assert main([*TASK, *given, "--include", "*.weight", "--json"]) == 0
    described = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    expected = noise_report(
        *digits, samples=40, samples_per_row=2, seed=3, include=["*.weight"], exclude=["fc1.weight"]
    )
    assert described == expected.describe()
    assert isinstance(described["reasons"], list)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples=0 must be a whole number of at least 1"),
        ({"samples": 2.5}, "samples=2.5"),
        ({"samples": 31}, "samples=31 rows of samples_per_row=1 need 31"),
        ({"samples_per_row": 0}, "samples_per_row=0"),
        ({"samples_per_row": None}, "samples_per_row=None"),
        ({"samples_per_row": 31}, "samples_per_row=31"),
        ({"seed": -1}, "seed=-1"),
        ({"include": 3}, "include=3"),
        ({"exclude": ["nothing"]}, "'nothing'"),
        ({"model": "digits"}, "model is of type str"),
        ({"calibration": 5}, "calibration is of type int"),
        ({"loss": "mse"}, "loss='mse' must be a function"),
        ({"calibration": (torch.zeros(30, 5), torch.zeros(30).long())}, "can't be called"),
        ({"calibration": (torch.zeros(30, 4), torch.full((30,), 7))}, "label 7"),
        ({"calibration": (torch.full((30, 4), torch.nan), torch.zeros(30).long())}, "sample"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    given = {"model": net(), "calibration": (torch.randn(30, 4), torch.zeros(30).long())}
    given |= arguments
    with pytest.raises(InputError) as caught:
        noise_report(given.pop("model"), given.pop("calibration"), **given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_input_on_the_command_line(capsys):
    assert main([*TASK, "--samples", "5000"]) == 2
    assert "calibration holds 1297" in capsys.readouterr().err
