"""How noisy a model's gradients are on given data, and what that says for pruning it.

What is said about the rows of `G` (n × p) is read off their Gram matrix `G Gᵀ` (n × n), but for
those that losses refute: finding them takes eight forward passes, sixteen if there seem to be any.
The rules behind the recommendation are those of `recommend`, and no others.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from swap_prune import contamination, outliers
from swap_prune import settings as settings_of
from swap_prune.audit import check_rows, losses_by_weights, possible
from swap_prune.calibration import Batch, CalibrationStream
from swap_prune.calling import check_module, ordinary_tensors
from swap_prune.errors import InputError
from swap_prune.evaluation import check_task, cross_entropy, outputs_of, row_losses
from swap_prune.gradients import DenseGradients, gradient_rows
from swap_prune.gradients.rows import Loss
from swap_prune.machine import check_memory, most_rows
from swap_prune.outliers import DUST
from swap_prune.prunable import select_weights
from swap_prune.pruning import check_unmasked, own_copy, read_seeded
from swap_prune.run_directory import jsonable
from swap_prune.settings import (
    COPIES,
    FEW_HELD_OUT,
    LEAST_MEMORY,
    MOST_ROWS,
    MOST_SAMPLES_PER_ROW,
    Settings,
    default_held_out,
)

DEFAULT_ROWS = 500
SPLITS = 20
# Rows of length one: ridge of the leave-one-out fit, and the explained share that still is none.
RIDGE, NEARLY_NOTHING = 0.01, 0.1
# The tail: this share of the rows, and at least so many.
TAIL_SHARE, LEAST_TAIL = 0.1, 2

# --- the rules' thresholds ----------------------------------------------------------------------
WANTED_AGREEMENT = 0.9
FEW_ROWS = 200
LEAST_CONTAMINATION = 0.02
# Below it the expected squared norm is infinite: what the regression fits never settles.
LEAST_TAIL_INDEX = 2.0


@dataclass(frozen=True)
class NoiseReport:
    """What the rows of `G` say about their noise; None stands where a number doesn't exist.

    Attributes:
        rows: n.
        samples_per_row: m, the samples averaged in a row.
        weights: p.
        available: samples in the calibration data.
        effective_rank: exp of the entropy of the normalised eigenvalues of `G Gᵀ`; at most n.
        participation_ratio: (Σλ)² / Σλ² of the same eigenvalues; at most `effective_rank`.
        largest_1_percent: share of the squared gradient that the largest 1% of the rows carry.
        largest_10_percent: likewise 10%.
        tail_index: Hill's, of the norms of the largest 10% of the rows; the smaller, the heavier
            the tail. None below 20 rows that don't vanish.
        max_to_median: the largest norm over the median norm; infinite if most rows vanish.
        vanishing: rows that are zero.
        outliers: rows whose log-norm is above median + 3.5 · 1.4826 · MAD.
        orthogonal: rows of which the others explain nearly nothing (less than 0.1 of what is left
            beyond chance, leave-one-out ridge). None below 3 rows, or if there are so few weights
            that chance explains more than half.
        refuted: rows whose error is larger than the gradient, by finite differences of the losses
            (see `audit`). None for weights in half precision, which is too coarse for them.
        refuted_singly: whether the other rows are exact, so that refuted ones can be corrected.
        outlying_inputs: samples of a group whose inputs are far noisier than the others', and
            which the model fails on (see `outliers`).
        opposed: share of the rows that point against the mean of the others.
        opposed_weight: the same, every row weighted by its norm.
        agreement: cosine between the mean gradients of two halves of the rows, mean of 20 splits.
        signal_to_noise: of the mean gradient of all rows, in power, from `agreement`.
        samples_per_row_needed: m at which as many rows would agree to 0.9; None without a signal.
        classes: K. This and what follows for classifiers with the default loss, None otherwise.
        contamination: η, the share of labels drawn blindly (see `contamination.estimate`).
        contamination_gain: log-likelihood that η has over no contamination, in nats.
        observed_error: share of the labels that aren't the model's first choice.
        expected_error: the same if the model's probabilities were true, mean of 1 - max p.
        recommendation: settings for `prune`.
        reasons: a sentence for each, with the number that led to it.
    """

    rows: int
    samples_per_row: int
    weights: int
    available: int
    effective_rank: float | None
    participation_ratio: float | None
    largest_1_percent: float | None
    largest_10_percent: float | None
    tail_index: float | None
    max_to_median: float | None
    vanishing: int
    outliers: int
    orthogonal: int | None
    refuted: int | None
    refuted_singly: bool | None
    outlying_inputs: int | None
    opposed: float | None
    opposed_weight: float | None
    agreement: float | None
    signal_to_noise: float | None
    samples_per_row_needed: int | None
    classes: int | None = None
    contamination: float | None = None
    contamination_gain: float | None = None
    observed_error: float | None = None
    expected_error: float | None = None
    recommendation: dict[str, Any] | None = None
    reasons: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return jsonable(asdict(self))

    def __str__(self) -> str:
        lines = [
            f"{self.rows:,} rows of {_count(self.samples_per_row, 'sample')}, gradients for "
            f"{self.weights:,} weights; {_count(self.available, 'calibration sample')}",
            "",
        ]
        for label, name, note in LINES:
            value = getattr(self, name)
            if name in CLASSIFIER_LINES and self.classes is None:
                continue
            lines.append(f"{label:<34}{_shown(value):>14}   {note}".rstrip())
        chosen = ", ".join(
            f"{name}={value!r}" for name, value in (self.recommendation or {}).items()
        )
        return "\n".join([*lines, "", f"recommended: {chosen}", *(f"- {r}" for r in self.reasons)])


# Label, attribute and note of each line of the text.
LINES = (
    ("effective rank", "effective_rank", "of at most one a row"),
    ("participation ratio", "participation_ratio", ""),
    ("carried by the largest 1%", "largest_1_percent", "share of the squared gradient"),
    ("carried by the largest 10%", "largest_10_percent", ""),
    ("tail index", "tail_index", "Hill, norms of the largest 10%; below 2 is heavy"),
    ("largest norm / median", "max_to_median", ""),
    ("vanishing rows", "vanishing", ""),
    ("outlier rows", "outliers", "log-norm beyond 3.5 robust deviations"),
    ("rows orthogonal to the others", "orthogonal", "nothing beyond chance explained"),
    ("rows refuted by losses", "refuted", "more error than gradient, by finite differences"),
    ("outlying inputs", "outlying_inputs", "a group of samples that the model fails on"),
    ("rows against the others' mean", "opposed", "share"),
    ("  weighted by norm", "opposed_weight", ""),
    ("agreement between halves", "agreement", "cosine, mean of 20 splits"),
    ("signal-to-noise of the mean", "signal_to_noise", "in power"),
    ("samples a row for 0.9", "samples_per_row_needed", "with as many rows"),
    ("contamination of the labels", "contamination", "share drawn blindly"),
    ("  log-likelihood gained", "contamination_gain", "nats; below 1.35 it may be chance"),
    ("error observed", "observed_error", ""),
    ("error the model expects", "expected_error", ""),
)
CLASSIFIER_LINES = (
    "contamination", "contamination_gain", "observed_error", "expected_error",
)  # fmt: skip


@ordinary_tensors()
def noise_report(
    model: nn.Module,
    calibration: Any,
    *,
    loss: Loss | None = None,
    samples: int | None = None,
    samples_per_row: int = 1,
    include: Any = None,
    exclude: Any = (),
    seed: int = 0,
) -> NoiseReport:
    """Measure how noisy the gradients are at the model's weights, and recommend settings.

    Args:
        model: any module; it is left as it is.
        calibration: as for `prune`.
        loss: `loss(model(x), targets)`, the mean over the batch; default: cross-entropy.
        samples: rows of G, n (500, or as many as the data has).
        samples_per_row: samples averaged in a row, m.
        include: which weights, as for `prune`.
        exclude: what to leave out of them.
        seed: fixes the samples drawn and the halves.

    Returns:
        The measures, the recommendation and its reasons; the rules are those of `recommend`.

    Raises:
        InputError: an argument can't be used.
    """
    check_module(model)
    check_unmasked(model)
    samples, samples_per_row, seed = map(settings_of.plain, (samples, samples_per_row, seed))
    if samples_per_row is None:
        raise InputError("samples_per_row=None must be a whole number of at least 1")
    # Magnitude, with nothing held out: the checks of `prune` without those of its regressions.
    given = Settings(
        sparsity=0.0,
        method="magnitude",
        samples=samples,
        samples_per_row=samples_per_row,
        held_out=0,
        include=include,
        exclude=exclude,
        seed=seed,
    )
    settings_of.check(given)
    source = read_seeded(calibration, seed)
    resolved = settings_of.resolve(given, len(source))
    assert resolved.samples is not None
    n = samples or min(DEFAULT_ROWS, resolved.samples)
    weights = select_weights(model, resolved.include, resolved.exclude)
    check_memory(n, weights.size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        own = own_copy(model)
        batch, indices = CalibrationStream(source, 0, 0, seed).draw(n * samples_per_row)
        check_task(own, batch, loss, indices)
        gradients = gradient_rows(
            own, weights, *batch, loss or cross_entropy, samples_per_row, numbers=indices
        )
        labels = _label_noise(own, batch) if loss is None else {}
        outlying = _outlying_inputs(own, batch, loss or cross_entropy)
        losses = losses_by_weights(own, weights, batch, loss or cross_entropy, samples_per_row)
        directions = torch.Generator().manual_seed(seed)
        audit = None
        if possible(own, weights):
            with weights.kept(own):
                audit = check_rows(gradients, losses, weights.read(own), directions)
    gram = scaled_gram(gradients)
    report = measure(gram, weights.size, samples_per_row, len(source), generator)
    report = replace(
        report,
        refuted=None if audit is None else len(audit.refuted),
        refuted_singly=None if audit is None else audit.single,
        outlying_inputs=outlying,
        **labels,
    )
    recommendation, reasons = recommend(report)
    return replace(report, recommendation=recommendation, reasons=reasons)


# --- measures of the rows -----------------------------------------------------------------------


def scaled_gram(gradients: DenseGradients) -> Tensor:
    """`G Gᵀ` (n, n) in float64, of rows of any magnitude; scales the rows of `G` in place."""
    matrix = gradients.rows()
    # Squares of float32 leave its range below 1e-19 and above 1e19.
    scale = torch.linalg.vector_norm(matrix, ord=math.inf, dim=1)
    matrix.div_(torch.where(scale > 0, scale, 1)[:, None])
    return gradients.gram() * torch.outer(scale.double(), scale.double())


def measure(
    gram: Tensor, weights: int, samples_per_row: int, available: int, generator: torch.Generator
) -> NoiseReport:
    """The report on rows with this Gram matrix, as far as the rows go.

    Args:
        gram: `G Gᵀ` (n, n) in float64.
        weights: p.
        samples_per_row: m.
        available: samples in the data.
        generator: what the halves are drawn from.
    """
    norms = gram.diagonal().clamp(min=0).sqrt()
    agreement = half_agreement(gram, generator)
    rank, participation = effective_ranks(gram)
    opposed, opposed_weight = opposition(gram)
    return NoiseReport(
        rows=len(gram),
        samples_per_row=samples_per_row,
        weights=weights,
        available=available,
        effective_rank=rank,
        participation_ratio=participation,
        largest_1_percent=share_of_largest(norms, 0.01),
        largest_10_percent=share_of_largest(norms, 0.1),
        tail_index=tail_index(norms),
        max_to_median=_max_to_median(norms),
        vanishing=int((norms == 0).sum()),
        outliers=count_outliers(norms),
        orthogonal=count_orthogonal(gram, weights),
        refuted=None,
        refuted_singly=None,
        outlying_inputs=None,
        opposed=opposed,
        opposed_weight=opposed_weight,
        agreement=agreement,
        signal_to_noise=None if agreement is None else 2 * _odds(agreement),
        samples_per_row_needed=_samples_needed(agreement, samples_per_row),
    )


def _outlying_inputs(model: nn.Module, batch: Batch, loss: Loss) -> int:
    """How many of these samples would be left out if `prune` held them out."""
    screen = outliers.find(batch[0], row_losses(model, batch, loss, 1))
    return 0 if screen is None else int((~screen.keeps(batch[0])).sum())


def effective_ranks(gram: Tensor) -> tuple[float | None, float | None]:
    """Of normalised eigenvalues: exp of their entropy, and 1 over the sum of their squares."""
    if not gram.any():
        return None, None
    # Scaled first, so that squares stay in range.
    values = torch.linalg.eigvalsh(gram / gram.diagonal().max()).clamp(min=0)
    values = values / values.sum()
    return float(torch.special.entr(values).sum().exp()), float(1 / values.square().sum())


def share_of_largest(norms: Tensor, fraction: float) -> float | None:
    """The share of `Σ norms²` that a fraction of the rows, rounded up, carries at most."""
    if not norms.any():
        return None
    squares = (norms / norms.max()).square()
    # Less the rounding of 0.1 · n, which would take one row more.
    count = math.ceil(fraction * len(norms) - 1e-9)
    return float(squares.topk(count).values.sum() / squares.sum())


def tail_index(norms: Tensor) -> float | None:
    """Hill's estimate from the largest 10% of the norms that don't vanish; infinite if equal."""
    logs = norms[norms > 0].log().sort(descending=True).values
    count = int(TAIL_SHARE * len(logs) + 1e-9)
    if count < LEAST_TAIL:
        return None
    excess = float((logs[:count] - logs[count]).mean())
    return 1 / excess if excess > DUST else math.inf


def _max_to_median(norms: Tensor) -> float | None:
    if not norms.any():
        return None
    median = float(norms.quantile(0.5))
    return float(norms.max()) / median if median > 0 else math.inf


def count_outliers(norms: Tensor) -> int:
    """How many log-norms are beyond the median by 3.5 robust standard deviations."""
    return int((norms > outliers.limit(norms)).sum())


def count_orthogonal(gram: Tensor, weights: int) -> int | None:
    """How many rows the others explain nearly nothing of, beyond chance.

    With rows of length one, `C` their Gram matrix and `A = (C + δI)⁻¹`, the ridge fit of row i by
    the others explains `1 + δ - 1/A_ii` of it, and `tr(C A) / p` of a row of pure chance.
    """
    norms = gram.diagonal().clamp(min=0).sqrt()
    there = norms > 0
    n = int(there.sum())
    if n < 3:
        return None
    norms = norms[there]
    cosines = gram[there][:, there] / norms / norms[:, None]
    inverse = torch.linalg.inv(cosines + RIDGE * torch.eye(n, dtype=gram.dtype))
    diagonal = inverse.diagonal()
    explained = 1 + RIDGE - 1 / diagonal
    chance = (n - RIDGE * float(diagonal.sum())) / weights
    if chance > 0.5:
        return None
    return int(((explained - chance) / (1 - chance) < NEARLY_NOTHING).sum())


def opposition(gram: Tensor) -> tuple[float | None, float | None]:
    """The share of the rows at an obtuse angle to the mean of the others, and it by norm."""
    norms = gram.diagonal().clamp(min=0).sqrt()
    if len(gram) < 2 or not norms.any():
        return None, None
    with_sum = gram.sum(dim=1)
    with_others = with_sum - gram.diagonal()
    others = (gram.sum() - with_sum - with_others).clamp(min=0).sqrt()
    against = with_others < -DUST * norms * others
    return float(against.double().mean()), float(norms[against].sum() / norms.sum())


def half_agreement(gram: Tensor, generator: torch.Generator) -> float | None:
    """The cosine between the mean rows of two random halves, mean over the splits.

    An odd row stays out. Splits in which a half's mean vanishes have no cosine and don't count.
    """
    n = len(gram)
    if n < 2 or not gram.any():
        return None
    order = torch.rand(SPLITS, n, generator=generator).argsort(dim=1)
    first, second = (
        torch.zeros(SPLITS, n, dtype=gram.dtype).scatter_(1, part, 1.0)
        for part in (order[:, : n // 2], order[:, n // 2 : n // 2 * 2])
    )
    scaled = gram / gram.diagonal().max()
    between = ((first @ scaled) * second).sum(dim=1)
    lengths = [((half @ scaled) * half).sum(dim=1).clamp(min=0).sqrt() for half in (first, second)]
    product = lengths[0] * lengths[1]
    valid = product > 0
    if not valid.any():
        return None
    return float((between[valid] / product[valid]).clamp(-1, 1).mean())


def _odds(agreement: float) -> float:
    """Signal over noise, in power, of the mean of half the rows: agreement is S / (S + N)."""
    if agreement > 1 - DUST**2:
        return math.inf
    return max(0.0, agreement) / (1 - agreement)


def _samples_needed(agreement: float | None, samples_per_row: int) -> int | None:
    """The m for the wanted agreement: averaging m samples divides the noise's power by m."""
    if agreement is None or agreement <= 0:
        return None
    factor = _odds(WANTED_AGREEMENT) / _odds(agreement)
    return max(1, math.ceil(samples_per_row * factor - 1e-9))


# --- labels -------------------------------------------------------------------------------------


def _label_noise(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """What a classifier's probabilities say about the labels of a batch."""
    inputs, labels = batch
    outputs = torch.cat([output for _, output in outputs_of(model, inputs)])
    logs = outputs.double().log_softmax(dim=1)
    classes = logs.shape[1]
    if classes < 2:
        return {}
    largest, choice = logs.max(dim=1)
    likelihoods = logs.gather(1, labels.long()[:, None]).flatten()
    eta = contamination.estimate(likelihoods, classes)
    return {
        "classes": classes,
        "contamination": eta,
        "contamination_gain": contamination.likelihood_gain(likelihoods, eta, classes),
        "observed_error": float((choice != labels).double().mean()),
        "expected_error": float((1 - largest.exp()).mean()),
    }


# --- the recommendation -------------------------------------------------------------------------


def recommend(report: NoiseReport) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settings for `prune` that the measures speak for, and the reasons in words.

    1. Nothing to regress on (every row vanishes, or there is a single sample): "magnitude"; fewer
       than 10 samples to hold out: "wf".
    2. `held_out`: a fifth of the samples, at most 1,000, as `prune` has it.
    3. `samples`: 1,000 rows, or as many as data and memory allow.
    4. `samples_per_row`: as many as the data allow, up to 16, if the halves agree to less than 0.9
       or the tail index is below 2; otherwise as many as were measured.
    5. `method`: "ewr"; how much it is worth depends on rows that losses refute, on outlying inputs,
       on the contamination of the labels (above 0.02 and more than chance) and on the rows (fewer
       than 200), and the reasons say so.
    """
    available = report.available
    held_out = default_held_out(available)
    if report.vanishing == report.rows or available == 1:
        return _by_magnitude(report)
    pool = available - held_out
    if held_out < FEW_HELD_OUT:
        why = (
            f"A fifth of {available} calibration samples are too few to choose a regression's "
            f"settings by (fewer than {FEW_HELD_OUT}): wf, which has none that are chosen so."
        )
        few = {"method": "wf", "samples": pool, "samples_per_row": 1, "held_out": held_out}
        return few, (why,)
    held = most_rows(report.weights)
    # Room for the rows that ewr remembers at least, or as many as there are.
    samples = max(1, min(MOST_ROWS, pool, max(held // 2, held - COPIES * LEAST_MEMORY)))
    samples_per_row, about_rows = _choose_samples_per_row(report, pool // samples)
    about_method = _reasons_for_ewr(report, samples)
    chosen = {
        "method": "ewr",
        "samples": samples,
        "samples_per_row": samples_per_row,
        "held_out": held_out,
    }
    limit = "memory holds" if samples < min(MOST_ROWS, pool) else f"the other {pool:,} allow"
    about_samples = (
        f"Of {_count(available, 'calibration sample')}, {held_out:,} are held out to choose "
        f"settings by, and {limit} {_count(samples, 'row')} a stage."
    )
    return chosen, (*about_method, about_samples, *about_rows)


def _by_magnitude(report: NoiseReport) -> tuple[dict[str, Any], tuple[str, ...]]:
    why = (
        "There is one calibration sample, which tells nothing of others: magnitude, which needs "
        "none."
        if report.available == 1
        else f"All {_count(report.rows, 'gradient')} measured vanish, so a regression on them has "
        "nothing to go by: magnitude, which needs none."
    )
    chosen = {"method": "magnitude", "samples": 1, "samples_per_row": 1, "held_out": 0}
    return chosen, (why,)


def _reasons_for_ewr(report: NoiseReport, samples: int) -> list[str]:
    reasons = []
    if report.refuted and report.refuted_singly:
        reasons.append(
            f"{report.refuted:,} of {_count(report.rows, 'gradient')} disagree with the changes of "
            "the losses: ewr, which corrects such rows (audit=False if they are meant to differ)."
        )
    if report.outlying_inputs:
        reasons.append(
            f"The inputs of {_count(report.outlying_inputs, 'sample')} are far noisier than the "
            "others', and the model fails on them: ewr, which leaves such samples out "
            "(screen=False if they are right)."
        )
    eta, gain = report.contamination, report.contamination_gain
    least = contamination.LEAST_GAIN
    if eta is not None and gain is not None and eta > LEAST_CONTAMINATION and gain > least:
        reasons.append(
            f"The contamination of the labels is {eta:.3f} (above {LEAST_CONTAMINATION}): "
            "ewr, whose masses discount mislabelled samples."
        )
    if samples < FEW_ROWS:
        reasons.append(
            f"The data allow {_count(samples, 'row')} a stage (fewer than {FEW_ROWS}): ewr, which "
            "refits layers' outputs, known without gradients; that counts most when rows are few."
        )
    if reasons:
        return reasons
    if eta is None:
        labels = "No contamination of labels can be measured for this loss"
    elif eta > LEAST_CONTAMINATION:
        labels = f"The contamination of the labels, {eta:.3f}, may be chance"
    else:
        labels = f"The contamination of the labels is {eta:.3f} (at most {LEAST_CONTAMINATION})"
    return [
        f"{labels}, and {samples:,} rows a stage are not few: ewr, which refits layers' outputs "
        "and, where stages draw other samples, averages their gradients; lr, which does neither, "
        "will come close, or be ahead where a small model knows these samples by heart."
    ]


def _choose_samples_per_row(report: NoiseReport, most: int) -> tuple[int, list[str]]:
    """The m to take and why; the data allow `most` with the rows chosen already."""
    most = max(1, min(MOST_SAMPLES_PER_ROW, most))
    reasons = []
    agreement, needed = report.agreement, report.samples_per_row_needed
    as_many = f"{_count(most, 'sample')} a row, as many as the data allow up to 16"
    if most == 1:
        as_many = "more samples would help, but not as fewer rows of several (docs/noise_report.md)"
    if agreement is not None and agreement < WANTED_AGREEMENT:
        wanted = (
            "no signal was found"
            if needed is None
            else f"that takes about {needed:,} samples a row"
        )
        reasons.append(
            f"The mean gradients of two halves of the {report.rows:,} rows agree to "
            f"{agreement:.2f} (below {WANTED_AGREEMENT}; {wanted}): {as_many}."
        )
    if report.tail_index is not None and report.tail_index < LEAST_TAIL_INDEX:
        reasons.append(
            f"The tail index of the row norms is {report.tail_index:.2f} (below "
            f"{LEAST_TAIL_INDEX:g}), and averaging leaves less to a single sample: {as_many}."
        )
    if reasons:
        return most, reasons
    kept = min(report.samples_per_row, most)
    if agreement is None:
        return kept, [f"The agreement between halves is not available: {kept} a row, as measured."]
    return kept, [
        f"The mean gradients of two halves of the {report.rows:,} rows agree to {agreement:.2f} "
        f"(at least {WANTED_AGREEMENT}): {_count(kept, 'sample')} a row will do."
    ]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _shown(value: Any) -> str:
    if value is None:
        return "not available"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value):
        return "infinite"
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"
