import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from swap_prune.errors import InputError
from swap_prune.gradients import DenseGradients, gradient_rows
from swap_prune.gradients import rows as rows_module
from swap_prune.prunable import select_weights


def loop_rows(model, weights, inputs, targets, loss, m):
    """The oracle: one ordinary backward pass a row."""
    from torch.utils._pytree import tree_leaves, tree_map

    model.eval()
    rows = []
    for i in range(0, tree_leaves(inputs)[0].shape[0], m):
        x, y = tree_map(lambda leaf, i=i: leaf[i : i + m], (inputs, targets))
        model.zero_grad()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        loss(rows_module.call(model, x), y).backward()
        zero = [model.get_parameter(n) for n in weights.names]
        rows.append(
            torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in zero])
        )
    model.zero_grad()
    return torch.stack(rows)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens)).mean(1)))


class TwoNames(nn.Module):
    """A module under two names, and a weight in two modules, with time before samples."""

    def __init__(self) -> None:
        super().__init__()
        once, other = nn.Linear(6, 6), nn.Linear(6, 6)
        other.weight = once.weight
        self.layers = nn.ModuleList([once, once, other])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x.mean(0))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(3, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left) * self.right(right)


class Reused(nn.Module):
    """One layer called twice, and an in-place activation behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.layer(self.relu(self.layer(x))))[:, :3]


class WeightUsedOutside(nn.Module):
    """The layer's weight also acts as a plain tensor, which no hook can see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.layer.weight.T


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).tanh().mean(0)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8),
        nn.GroupNorm(2, 8),
        nn.Conv2d(8, 6, (1, 3), padding="same", groups=2, padding_mode="circular"),
        nn.Flatten(),
        nn.LayerNorm(6 * 16),
        nn.Dropout(0.5),
        nn.Linear(6 * 16, 3),
    )


def images(n: int) -> Tensor:
    return torch.randn(n, 4, 8, 8)


CASES = {
    "conv, norms, depthwise": (convolutional, images, None, True),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3, stride=2), nn.Flatten(), nn.Linear(12, 3)),
        lambda n: torch.randn(n, 2, 8),
        None,
        True,
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(16, 3)),
        lambda n: torch.randn(n, 1, 3, 3, 3),
        None,
        True,
    ),
    "linear over positions": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)),
        lambda n: torch.randn(n, 4, 5),
        None,
        True,
    ),
    "float64": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double(),
        lambda n: torch.randn(n, 5, dtype=torch.float64),
        None,
        True,
    ),
    "reused layer": (Reused, lambda n: torch.randn(n, 6), None, True),
    "tuple inputs": (TwoInputs, lambda n: (torch.randn(n, 5), torch.randn(n, 3)), None, True),
    "dict inputs": (
        TwoInputs,
        lambda n: {"right": torch.randn(n, 3), "left": torch.randn(n, 5)},
        None,
        True,
    ),
    "tied embedding": (Tied, lambda n: torch.randint(11, (n, 4)), None, False),
    "embedding alone": (Tied, lambda n: torch.randint(11, (n, 4)), ["Embedding"], False),
    "attention": (Attention, lambda n: torch.randn(n, 5, 8), None, False),
    "packed projections": (
        Attention,
        lambda n: torch.randn(n, 5, 8),
        ["*in_proj_weight", "Linear"],
        False,
    ),
    "weight used outside": (WeightUsedOutside, lambda n: torch.randn(n, 6), None, False),
    "two names": (TwoNames, lambda n: torch.randn(n, 4, 6), None, False),
    "sequence first": (SequenceFirst, lambda n: torch.randn(n, 4, 6), None, False),
    "sequence first, as long as the batch": (
        SequenceFirst,
        lambda n: torch.randn(n, 12, 6),
        None,
        False,
    ),
}


def test_a_first_sample_without_gradient_proves_nothing():
    torch.manual_seed(0)
    model, inputs = WeightUsedOutside(), torch.randn(12, 6)
    inputs[0] = 0.0
    weights, targets = select_weights(model), torch.randint(3, (12,))
    expected = loop_rows(model, weights, inputs, targets, functional.cross_entropy, 1)
    G = gradient_rows(model, weights, inputs, targets, functional.cross_entropy)
    torch.testing.assert_close(G.rows(), expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_rows_equal_single_backward_passes(case, m, monkeypatch):
    torch.manual_seed(0)
    build, data, include, factored = CASES[case]
    model = build()
    weights = select_weights(model, include)
    inputs, targets = data(12), torch.randint(3, (12,))
    expected = loop_rows(model, weights, inputs, targets, functional.cross_entropy, m)
    samples = 6 if "as long" not in case else 12
    monkeypatch.setattr(rows_module, "CHUNK_SAMPLES", (samples, samples))
    calls = []
    vectorised = rows_module._fill_vectorised
    monkeypatch.setattr(
        rows_module, "_fill_vectorised", lambda *a: (calls.append(1), vectorised(*a))
    )
    G = gradient_rows(model, weights, inputs, targets, functional.cross_entropy, m)
    torch.testing.assert_close(G.rows(), expected.float(), rtol=2e-4, atol=1e-6)
    assert bool(calls) != factored
    assert all(isinstance(model.get_parameter(name), nn.Parameter) for name in weights.names)


def test_model_is_left_as_it_was():
    torch.manual_seed(0)
    model = convolutional().train()
    model[0].weight.requires_grad_(False)
    model[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    weights = select_weights(model)
    gradient_rows(model, weights, images(4), torch.zeros(4).long(), functional.cross_entropy)
    assert model.training
    assert not model[1].training
    assert not model[0].weight.requires_grad
    assert model[9].weight.requires_grad
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(not module._forward_hooks for module in model.modules())


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) if x.sum().item() > 0 else -x.sum(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0][:, -1]


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.sum(1)


class Undifferentiable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NoWayBack.apply(x)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    ("model", "inputs", "include", "module"),
    [
        (
            nn.Sequential(nn.Embedding(5, 3), Branching()),
            torch.randint(5, (80, 2)),
            ["Embedding"],
            r"module 1 \(Branching\)",
        ),
        (Recurrent(), torch.randn(80, 4, 3), ["recurrent.weight*"], r"recurrent \(GRU\)"),
    ],
)
def test_what_can_not_be_vectorised_is_computed_row_by_row(model, inputs, include, module, m):
    weights, labels = select_weights(model, include), torch.randint(3, (80,))
    with pytest.warns(UserWarning, match=module):
        rows = gradient_rows(model, weights, inputs, labels, functional.cross_entropy, m).rows()
    expected = loop_rows(model, weights, inputs, labels, functional.cross_entropy, m)
    torch.testing.assert_close(rows, expected)


def test_says_which_module_has_no_rows():
    model = nn.Sequential(nn.Embedding(5, 3), Undifferentiable())
    weights = select_weights(model, ["Embedding"])
    tokens = torch.randint(5, (4, 2))
    with pytest.raises(InputError, match=r"module 1 \(Undifferentiable\)"):
        gradient_rows(model, weights, tokens, torch.zeros(4).long(), functional.cross_entropy)


@pytest.mark.parametrize("bad", [17, 217])
def test_names_the_sample_on_which_the_model_fails(bad):
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3))
    tokens = torch.randint(5, (300, 2))
    tokens[bad] = 9
    with pytest.raises(InputError, match=f"fails on calibration sample {bad}: IndexError"):
        gradient_rows(
            model, select_weights(model), tokens, torch.zeros(300).long(), functional.cross_entropy
        )


@pytest.mark.parametrize("m", [1, 2])
def test_names_the_sample_whose_loss_is_not_finite(m):
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(40, 4)
    x[37, 2] = float("inf")
    with pytest.raises(InputError, match="sample 37 is nan"):
        gradient_rows(
            model, select_weights(model), x, torch.zeros(40).long(), functional.cross_entropy, m
        )


def test_names_the_sample_whose_gradient_is_not_finite():
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.ones(4, 4)
    x[2] = 0.0

    def root(output: Tensor, target: Tensor) -> Tensor:
        return (output - model[0].bias).sum().abs().sqrt()

    with pytest.raises(InputError, match="gradient of calibration sample 2"):
        gradient_rows(model, select_weights(model), x, torch.zeros(4), root)


def test_operator_products_columns_and_checks():
    torch.manual_seed(0)
    matrix = torch.randn(5, 9)
    G, w, v = DenseGradients(matrix), torch.randn(9), torch.randn(5)
    support = torch.tensor([1, 4, 8])
    torch.testing.assert_close(G @ w, matrix @ w)
    torch.testing.assert_close(G.T @ v, matrix.T @ v)
    torch.testing.assert_close(G.columns(support).rows(), matrix[:, support])
    exact = matrix.double() @ matrix.T.double()
    torch.testing.assert_close(G.gram(), exact, rtol=1e-5, atol=1e-6)
    assert (G.shape, G.T.shape) == ((5, 9), (9, 5))
    with pytest.raises(InputError, match="vector of 9 entries"):
        G @ v
    with pytest.raises(InputError, match="vector of 5 entries"):
        G.T @ w


class Remembering(nn.Module):
    """A network that keeps an activation, which no copy of it can be made with."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        self.hidden = torch.relu(self.first(x))
        return self.second(self.hidden)


class RememberingLoss(nn.Module):
    def forward(self, output, labels):
        self.output = output
        time.sleep(1e-4)
        return functional.cross_entropy(self.output, labels)


def test_threads_share_no_memory():
    torch.manual_seed(0)
    model, loss = Remembering().eval(), RememberingLoss()
    weights = select_weights(model)
    inputs, labels = torch.randn(640, 6), torch.randint(3, (640,))
    expected = loop_rows(model, weights, inputs, labels, functional.cross_entropy, 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        rows = [gradient_rows(model, weights, inputs, labels, loss).rows() for _ in range(2)]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    for found in rows:
        torch.testing.assert_close(found, expected)


def test_class_weights_count_in_rows_without_the_rare_class_first():
    """Rows by which ways are compared may all be of one class, where class weights cancel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    weights = select_weights(model)
    x, y = torch.randn(160, 6), torch.zeros(160).long()
    y[70] = 1
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0]))
    found = gradient_rows(model, weights, x, y, loss, samples_per_row=16).rows()
    torch.testing.assert_close(found, loop_rows(model, weights, x, y, loss, 16))


def test_gradients_are_taken_where_the_caller_has_none():
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 3), torch.randn(8, 6), torch.randint(0, 3, (8,))
    weights = select_weights(model)

    def loss(output, labels):
        return functional.cross_entropy(output, labels) * (1.0 if float(output[0, 0]) < 9 else 2.0)

    with torch.no_grad(), pytest.warns(UserWarning, match="one by one"):
        found = gradient_rows(model, weights, x, y, loss).rows()
    torch.testing.assert_close(found, loop_rows(model, weights, x, y, loss, 1))


class Padded(nn.Module):
    """Sequences with padding, whose transformer torch would run without calling its layers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x, padding):
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


def test_a_transformer_with_padding_has_its_rows_at_once(recwarn):
    torch.manual_seed(0)
    model, padding = Padded().eval(), torch.zeros(12, 5, dtype=torch.bool)
    padding[::2, 3:] = True
    inputs, labels = (torch.randn(12, 5, 8), padding), torch.arange(12) % 3
    weights = select_weights(model)
    rows = gradient_rows(model, weights, inputs, labels, functional.cross_entropy).rows()
    told = [str(warning.message) for warning in recwarn]
    assert not [message for message in told if "at once" in message], told
    assert torch.backends.mha.get_fastpath_enabled()
    model.train()  # no fast path there either, and no dropout to tell the difference
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    for sample, row in enumerate(rows):
        one = tuple(part[sample : sample + 1] for part in inputs)
        loss = functional.cross_entropy(model(*one), labels[sample : sample + 1])
        parameters = [model.get_parameter(name) for name in weights.names]
        exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        torch.testing.assert_close(row, exact, rtol=1e-3, atol=1e-5)


class RarelyTwice(nn.Module):
    """Uses a layer's weight besides the layer, for samples with a large first number only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        rare = (x[:, :1] > 1.5).float()
        return self.b((self.a(x) + rare * functional.linear(x.flip(1), self.a.weight)).relu())


def test_a_weight_used_elsewhere_for_a_few_samples():
    """The rows that are compared one by one, the first, the last and the largest, are right."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 5), torch.randint(0, 3, (40,))
    x[:, 0] = x[:, 0].clamp_max(1.0)
    x[0] *= 50
    x[3, 0] = 2.0
    x[0, 0] = 0.0
    model = RarelyTwice().eval()
    weights = select_weights(model)
    found = gradient_rows(model, weights, x, y, functional.cross_entropy).rows()
    truth = loop_rows(model, weights, x, y, functional.cross_entropy, 1)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-6)


class Routed(nn.Module):
    """Sends samples with a large first number, if there are any, through a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.rare = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.a(x).relu()
        rare = (x[:, 0] > 1).nonzero()[:, 0]
        output = self.b(hidden)
        return output.index_add(0, rare, self.rare(hidden[rare])) if len(rare) else output


def test_samples_that_go_another_way_than_the_first_chunks():
    torch.manual_seed(0)
    x, y = torch.randn(200, 5), torch.randint(0, 3, (200,))
    x[:, 0] = x[:, 0].clamp_max(0.9)
    x[[150, 170], 0] = 2.0
    model = Routed().eval()
    weights = select_weights(model)
    with pytest.warns(UserWarning, match="one by one"):
        found = gradient_rows(model, weights, x, y, functional.cross_entropy).rows()
    truth = loop_rows(model, weights, x, y, functional.cross_entropy, 1)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-6)


class Attributes(dict):
    """As many write it: an attribute that is not there raises KeyError."""

    def __getattr__(self, name):
        return self[name]


class Named(nn.Linear):
    def forward(self, x):
        return Attributes(logits=super().forward(x))


def test_outputs_that_raise_what_they_like():
    torch.manual_seed(0)
    model, x, y = Named(6, 3), torch.randn(8, 6), torch.randint(0, 3, (8,))
    weights = select_weights(model)

    def loss(output, labels):
        return functional.cross_entropy(output.logits, labels)

    found = gradient_rows(model, weights, x, y, loss).rows()
    torch.testing.assert_close(found, loop_rows(model, weights, x, y, loss, 1))
