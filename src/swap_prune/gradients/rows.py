"""Compute the rows of `G`: gradients of the loss of m samples each, for all rows at once.

Three ways, tried in this order:

* **factored**: one forward and one backward pass over a chunk of samples record, for every
  Linear and Conv layer, its input `a` and the gradient `b` of its output; a row's gradient is the
  sum over samples and positions of `b ⊗ a`, a batched matrix product. This costs what ordinary
  training costs. Chunks are spread over threads, each with modules of its own around the
  same parameters; a chunk is computed by one thread, so rows do not depend on how many there are.
* **vectorised**: `vmap` of `grad` of the whole model, for what the first can't express (embeddings,
  attention's packed projections, weights used outside their layer, batch not in dimension 0).
* **one by one**: a backward pass a row, for what can't be vectorised either (GRUs, data-dependent
  branches, losses that use `.item()`). Far slower, so that a warning says which module is why.

Rows of the first chunk (the first, the last, the largest) and their sum are compared with
autograd's own gradients; a difference, for whatever reason, rules the first way out. Samples
are taken to be independent: a model whose output for one depends on the others has no rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight
from torch.utils._pytree import tree_leaves, tree_map

from swap_prune.calling import call, evaluation_mode, formatted
from swap_prune.errors import InputError, NotFiniteError, reason, warn
from swap_prune.gradients.buffers import Buffers
from swap_prune.gradients.dense import DenseGradients
from swap_prune.prunable import PrunableWeights

Loss = Callable[[Any, Any], Tensor]
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

# Numbers in the inputs of a chunk: 32 CIFAR images, whose activations stay in a core's cache.
CHUNK_NUMBERS = 32 * 3 * 32 * 32
CHUNK_SAMPLES = (8, 64)
# Each holds the activations of a chunk.
MOST_WORKERS = 8
# Float32 rounding in another order of summation; a wrong formula is off by far more.
AGREEMENT = 1e-3


class NotFactorableError(Exception):
    """The layer's gradient is not of the factored form; the message says why."""


class NotVectorisableError(Exception):
    """Rows can't be computed all at once; the message says in which module, and why."""


@dataclass
class Worker:
    """What one thread computes rows with.

    Attributes:
        model: around the parameters that all workers share.
        loss: `loss(model(x), targets)`.
        buffers: memory for what a layer's product is made from.
    """

    model: nn.Module
    loss: Loss
    buffers: Buffers = field(default_factory=Buffers)


Fill = Callable[[Worker, PrunableWeights, Any, Any, Tensor], None]


def gradient_rows(
    model: nn.Module,
    weights: PrunableWeights,
    inputs: Any,
    targets: Any,
    loss: Loss,
    samples_per_row: int = 1,
    out: Tensor | None = None,
    progress: Callable[[int], None] | None = None,
    numbers: Tensor | None = None,
) -> DenseGradients:
    """`G` (n, p): row i is the gradient of the mean loss of the samples `i m ... (i+1) m - 1`.

    The model is used in eval mode and left as it was.

    Args:
        model: any module; called as `model(x)`, `model(*x)` for tuples, `model(**x)` for dicts.
        weights: which weights the columns stand for.
        inputs: a tensor, tuple or dict of tensors whose first dimension is n · m samples.
        targets: likewise; handed to `loss`.
        loss: `loss(model(x), targets)`, the mean over a batch, as a scalar.
        samples_per_row: m.
        out: a float32 matrix (n, p) to fill, so that stages can share one allocation.
        progress: called with the number of samples done.
        numbers: the samples' numbers (n m,) in the user's data, for error messages.

    Raises:
        InputError: if a row can't be computed (says which module and why) or is not finite
            (says which sample).
    """
    samples = tree_leaves(inputs)[0].shape[0]
    n = samples // samples_per_row
    if n == 0 or n * samples_per_row != samples:
        raise InputError(
            f"samples_per_row={samples_per_row} does not divide the {samples} samples given"
        )
    matrix = torch.empty(n, weights.size, dtype=torch.float32) if out is None else out
    rows_per_chunk = chunk_rows(inputs, samples_per_row)
    known = torch.arange(samples) if numbers is None else numbers

    def chunk(start: int) -> tuple[Any, Any, Tensor, slice]:
        block = matrix[start : start + rows_per_chunk]
        part = slice(start * samples_per_row, (start + len(block)) * samples_per_row)
        x, y = tree_map(lambda leaf: leaf[part], (inputs, targets))
        return x, y, block, part

    def check(worker: Worker, start: int) -> int:
        x, y, block, part = chunk(start)
        if not torch.isfinite(block.sum()):
            blame_sample(worker.model, x, y, worker.loss, known[part])
            _blame_row(block, known[part].view(len(block), -1))
        return len(block) * samples_per_row

    def compute(worker: Worker, start: int) -> int:
        x, y, block, _ = chunk(start)
        try:
            fill(worker, weights, x, y, block)
        except Exception:  # the model is the user's: anything may come out of it
            # These samples may go through the model in another way than those of the first chunk.
            failed.append(start)
            return 0
        return check(worker, start)

    def compute_otherwise(start: int) -> int:
        x, y, block, part = chunk(start)
        try:
            _fill_slowly(alone, weights, x, y, block)
        except Exception as error:  # as above
            blame_failing_sample(model, x, y, loss, known[part])
            raise InputError(
                f"the gradients of {len(known[part])} calibration samples can't be computed: "
                f"{reason(error)}"
            ) from error
        return check(alone, start)

    starts = range(0, n, rows_per_chunk)
    failed: list[int] = []
    with torch.enable_grad(), evaluation_mode(model):
        workers = _workers(model, loss, min(torch.get_num_threads(), len(starts)))
        x, y, block, part = chunk(0)
        alone = Worker(model, loss)
        try:
            fill = _choose_way(alone, weights, x, y, block)
        except InputError:
            blame_failing_sample(model, x, y, loss, known[part])
            raise
        alone.buffers = Buffers()
        if fill in (_fill_vectorised, _fill_one_by_one):
            workers = [alone]
        chunks = chain(
            [check(workers[0], 0)],
            _spread(compute, workers, starts[1:]),
            # What has failed by then: a generator is asked once the others have ended.
            (compute_otherwise(start) for start in failed),
        )
        for done in chunks:
            if progress is not None:
                progress(done)
    return DenseGradients(matrix)


def chunk_rows(inputs: Any, samples_per_row: int) -> int:
    """How many rows of samples like these to compute at once."""
    numbers_per_sample = sum(leaf[0].numel() for leaf in tree_leaves(inputs))
    least, most = CHUNK_SAMPLES
    samples = max(least, min(most, CHUNK_NUMBERS // max(1, numbers_per_sample)))
    return max(1, samples // samples_per_row)


def _workers(model: nn.Module, loss: Loss, threads: int) -> list[Worker]:
    """A model and a loss for each thread, around the same parameters.

    What a module remembers between its own layers must not be another thread's. Where copies
    can't be had, or would share a hook's memory, one thread does everything.
    """
    alone = [Worker(model, loss)]
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if threads == 1 or hooked:
        return alone
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        return [
            Worker(*copy.deepcopy((model, loss), dict(shared)))
            for _ in range(min(threads, MOST_WORKERS))
        ]
    except Exception:  # the model is the user's: anything may come out of it
        return alone


def _spread(
    compute: Callable[[Worker, int], int], workers: list[Worker], starts: Sequence[int]
) -> Iterator[int]:
    """Yield what `compute` returns for each start, in order, one start a worker at a time.

    Many small operations keep one thread each busier than few operations split over all threads.
    """
    if len(workers) == 1:
        yield from (compute(workers[0], start) for start in starts)
        return
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def task(start: int) -> int:
        worker = free.get()
        try:
            return compute(worker, start)
        finally:
            free.put(worker)

    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(len(workers), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(task, starts)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


# --- factored -----------------------------------------------------------------------------------


def _choose_way(worker: Worker, weights: PrunableWeights, x: Any, y: Any, block: Tensor) -> Fill:
    """The fastest way that agrees with autograd on the first chunk; fills `block` on the way."""
    ways: tuple[Fill, ...] = (_fill_channels_last, _fill_factored)
    for fill in ways:
        if _agrees(fill, worker, weights, x, y, block):
            return fill
    return _fill_slowly(worker, weights, x, y, block)


def _fill_slowly(worker: Worker, weights: PrunableWeights, x: Any, y: Any, block: Tensor) -> Fill:
    """Fill `block` in the first way that can, of those which need no layers that we know."""
    try:
        _fill_vectorised(worker, weights, x, y, block)
        return _fill_vectorised
    except NotVectorisableError as error:
        try:
            _fill_one_by_one(worker, weights, x, y, block)
        except Exception:  # the model is the user's: anything may come out of it
            raise InputError(str(error)) from error
        warn(f"{error}; they are taken one by one, which is slow")
        return _fill_one_by_one


def _agrees(
    fill: Fill, worker: Worker, weights: PrunableWeights, x: Any, y: Any, block: Tensor
) -> bool:
    """Fill the first block; False when that fails or differs from autograd."""
    try:
        fill(worker, weights, x, y, block)
    except Exception:  # outputs may be anything, with leaves that are no tensors
        return False
    # The row of the largest gradient can't agree by being zero, unless all are.
    norms = torch.linalg.vector_norm(block, dim=1)
    if not norms.max() > 0:
        return bool(torch.isnan(norms).any())  # a NaN is reported by the caller, with the sample
    return all(
        _row_agrees(worker.model, weights, x, y, worker.loss, block, row)
        for row in {0, int(norms.argmax()), len(block) - 1}
    ) and _sum_agrees(worker, weights, x, y, block)


def _row_agrees(
    model: nn.Module, weights: PrunableWeights, x: Any, y: Any, loss: Loss, block: Tensor, row: int
) -> bool:
    """Whether one row of `block` is what autograd says."""
    try:
        truth = _row(model, weights, x, y, loss, len(block), row)
    except RuntimeError:
        return False  # the vectorised way says which module is to blame
    return _close(block[row], truth, truth, weights)


def _sum_agrees(worker: Worker, weights: PrunableWeights, x: Any, y: Any, block: Tensor) -> bool:
    """Whether all rows together are: a weight may be used elsewhere for a few samples only."""
    try:
        truth = _autograd(worker.model, weights, lambda: _total_loss(worker, x, y, len(block)))
    except RuntimeError:
        return False  # as above
    return _close(block.sum(0), truth, block.abs().sum(0), weights)


def _close(found: Tensor, expected: Tensor, size: Tensor, weights: PrunableWeights) -> bool:
    """Whether gradients (p,) differ by rounding only, in each weight; `size` (p,) is theirs."""
    for _, _, columns in weights.slices():
        error = (found[columns] - expected[columns]).abs().max()
        if not error <= AGREEMENT * size[columns].abs().max() + 1e-12:
            return bool(torch.isnan(error))
    return True


def _row(
    model: nn.Module, weights: PrunableWeights, x: Any, y: Any, loss: Loss, rows: int, row: int
) -> Tensor:
    """One of the rows (p,) of a chunk, by a backward pass of its own."""
    m = tree_leaves(x)[0].shape[0] // rows
    part = slice(row * m, (row + 1) * m)
    one_x, one_y = tree_map(lambda leaf: leaf[part], (x, y))
    return _autograd(model, weights, lambda: loss(call(model, one_x), one_y))


def _autograd(model: nn.Module, weights: PrunableWeights, value: Callable[[], Tensor]) -> Tensor:
    """The gradient (p,) of a value that is computed with the model."""
    parameters = [model.get_parameter(name) for name in weights.names]
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        found = torch.autograd.grad(value(), parameters, materialize_grads=True)
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
    return torch.cat([gradient.flatten().float() for gradient in found])


def _total_loss(worker: Worker, x: Any, y: Any, rows: int) -> Tensor:
    """The sum of the losses of all rows."""
    output = call(worker.model, x)
    # The loss of a row need not be the mean of its samples': class weights make it another.
    by_row = tree_map(lambda leaf: leaf.unflatten(0, (rows, -1)), (output, y))
    return vmap(lambda o, t: worker.loss(o, t).reshape(()))(*by_row).sum()


def _fill_channels_last(
    worker: Worker, weights: PrunableWeights, x: Any, y: Any, block: Tensor
) -> None:
    """The factored way with images stored channels last, which convolutions are faster on."""
    images_last = formatted(x, torch.channels_last)
    _fill_factored(worker, weights, images_last, y, block)


def _fill_factored(worker: Worker, weights: PrunableWeights, x: Any, y: Any, block: Tensor) -> None:
    """One forward and one backward pass; each layer's hook adds its part to `block` (rows, p)."""
    model = worker.model
    samples = tree_leaves(x)[0].shape[0]
    by_parameter = {id(model.get_parameter(name)): part for name, _, part in weights.slices()}
    layers = [
        module for module in model.modules() if id(getattr(module, "weight", None)) in by_parameter
    ]
    plain = all(type(layer).forward in FACTORED_FORWARDS for layer in layers)
    if not plain or {id(layer.weight) for layer in layers} != set(by_parameter):
        raise NotFactorableError("a prunable weight belongs to a layer other than Linear or Conv")
    written: set[int] = set()
    anchors: list[Tensor] = []

    def record(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        a = args[0].detach()
        version = a._version
        if a.shape[0] != samples:
            raise NotFactorableError("the batch is not the first dimension of the layer's input")
        if not output.requires_grad:
            # Nothing before this layer needs gradients: give backward a place to start.
            anchors.append(torch.zeros((), requires_grad=True))
            output = output + anchors[-1]

        def contribute(b: Tensor | None) -> None:
            if b is None:
                raise NotFactorableError("no gradient comes back to the layer")
            if a._version != version:
                raise NotFactorableError("the layer's input was changed in place")
            part = by_parameter[id(layer.weight)]
            place = block[:, part].unflatten(1, layer.weight.shape)
            first = id(layer.weight) not in written
            written.add(id(layer.weight))
            if first and isinstance(layer, nn.Linear) and a.dtype == b.dtype == block.dtype:
                # In place: fresh memory for the product would take longer than the product.
                _linear_rows(a, b, len(block), out=place)
                return
            gradient = _layer_rows(worker, layer, a, b, len(block))
            if first:
                place.copy_(gradient)
            else:
                place += gradient

        output.register_hook(contribute)
        return output

    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        torch.autograd.grad(_total_loss(worker, x, y, len(block)), anchors)
    finally:
        for handle in handles:
            handle.remove()
    for key, part in by_parameter.items():
        if key not in written:
            block[:, part] = 0.0


FACTORED_FORWARDS = {
    nn.Linear.forward,
    nn.Conv1d.forward,
    nn.Conv2d.forward,
    nn.Conv3d.forward,
}


def _layer_rows(
    worker: Worker, layer: nn.Linear | Convolution, a: Tensor, b: Tensor, rows: int
) -> Tensor:
    """Gradients (rows, *shape) of a layer's weight from its inputs `a`, output gradients `b`.

    They may lie in a buffer of the worker's.
    """
    if isinstance(layer, nn.Linear):
        return _linear_rows(a, b, rows)
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        a, padding = functional.pad(a, padding_widths(layer), mode=mode), (0,) * (a.ndim - 2)
    if isinstance(layer, nn.Conv2d) and layer.groups == 1 and _is_channels_last(a):
        # Patches of many samples leave the cache, while few calls of a kernel cost nothing.
        sides = cast(tuple[int, int], padding)
        if rows == len(a) or layer.weight[0, 0].numel() == 1:
            return _line_rows(worker, layer, a, b, sides, rows)
        return _kernel_rows(layer, a, b, sides, rows)
    return _grouped_rows(layer, a, b, padding, rows)


def _linear_rows(a: Tensor, b: Tensor, rows: int, out: Tensor | None = None) -> Tensor:
    """Gradients (rows, outputs, inputs) of a Linear layer's weight."""
    # Samples of a row and positions inside a sample are summed alike.
    lefts, rights = (x.reshape(rows, -1, x.shape[-1]) for x in (b, a))
    return torch.bmm(lefts.transpose(1, 2), rights, out=out)


def _is_channels_last(a: Tensor) -> bool:
    return a.is_contiguous(memory_format=torch.channels_last)


def _line_rows(
    worker: Worker, layer: nn.Conv2d, a: Tensor, b: Tensor, padding: tuple[int, int], rows: int
) -> Tensor:
    """Weight gradients of a convolution on images stored channels last: a product a kernel line.

    A line's patches are copied; shifted by whole lines of the image they serve the other kernel
    lines too, as views where the stride is 1 and a row is one sample.
    """
    (samples, channels, image_h, image_w), (outputs_h, outputs_w) = a.shape, b.shape[2:]
    (high, wide), (kernel_h, kernel_w) = padding, layer.kernel_size
    (step_h, step_w), (spread_h, spread_w) = layer.stride, layer.dilation
    padded = worker.buffers.take(
        "padded", a, samples, image_h + 2 * high, image_w + 2 * wide, channels
    )
    padded.zero_()
    padded[:, high : high + image_h, wide : wide + image_w] = a.permute(0, 2, 3, 1)
    sample, line, column, channel = padded.stride()
    lines = worker.buffers.take("lines", a, samples, padded.shape[1], outputs_w, kernel_w, channels)
    lines.copy_(
        padded.as_strided(lines.shape, (sample, line, column * step_w, column * spread_w, channel))
    )
    outputs = b.permute(0, 2, 3, 1).reshape(rows, -1, b.shape[1]).transpose(1, 2)
    products = worker.buffers.take("products", a, kernel_h, rows, b.shape[1], kernel_w * channels)
    for i, product in enumerate(products):
        first = i * spread_h
        shifted = lines[:, first : first + step_h * (outputs_h - 1) + 1 : step_h]
        torch.bmm(outputs, shifted.reshape(rows, -1, kernel_w * channels), out=product)
    joined = products[0]
    if kernel_h > 1:
        # Kernel lines side by side first: one transposition of (k², channels) then is far faster
        # than a copy that gathers from all of them.
        joined = worker.buffers.take("joined", a, rows, b.shape[1], kernel_h * kernel_w * channels)
        torch.cat(tuple(products), dim=2, out=joined)
    return joined.unflatten(2, (kernel_h, kernel_w, channels)).permute(0, 1, 4, 2, 3)


def _kernel_rows(
    layer: nn.Conv2d, a: Tensor, b: Tensor, padding: tuple[int, int], rows: int
) -> Tensor:
    """Weight gradients of a convolution: the library's own kernel, once a row."""
    shape, m = layer.weight.shape, len(a) // rows
    return torch.stack(
        [
            conv2d_weight(one_a, shape, one_b, layer.stride, padding, layer.dilation)
            for one_a, one_b in zip(a.split(m), b.split(m), strict=True)
        ]
    )


def _grouped_rows(layer: Convolution, a: Tensor, b: Tensor, padding: Any, rows: int) -> Tensor:
    """Weight gradients of any convolution: rows become groups of one larger convolution.

    The library's own weight-gradient kernel handles that without unfolding the inputs.
    """
    shape = (rows * b.shape[1], *layer.weight.shape[1:])
    a, b = _rows_as_channels(a, rows), _rows_as_channels(b, rows)
    weight_gradient = _WEIGHT_GRADIENTS[a.ndim - 2]
    return weight_gradient(
        a, shape, b, layer.stride, padding, layer.dilation, rows * layer.groups
    ).view(rows, *layer.weight.shape)


_WEIGHT_GRADIENTS: dict[int, Callable[..., Tensor]] = {
    1: conv1d_weight,
    2: conv2d_weight,
    3: conv3d_weight,
}


def _rows_as_channels(tensor: Tensor, rows: int) -> Tensor:
    """(rows · m, channels, ...) as (m, rows · channels, ...)."""
    m = tensor.shape[0] // rows
    split = tensor.reshape(rows, m, *tensor.shape[1:]).transpose(0, 1)
    return split.reshape(m, -1, *tensor.shape[2:])


def padding_widths(layer: Convolution) -> list[int]:
    """The argument of `functional.pad`, last dimension first, for any padding of a Conv layer."""
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [side for t in reversed(totals) for side in (t // 2, t - t // 2)]
    widths = cast(tuple[int, ...], layer.padding)
    return [side for width in reversed(widths) for side in (width, width)]


# --- vectorised ---------------------------------------------------------------------------------


def _fill_vectorised(
    worker: Worker, weights: PrunableWeights, x: Any, y: Any, block: Tensor
) -> None:
    """`vmap(grad(loss))` over the rows of a chunk, written into `block` (rows, p)."""
    model, loss, rows = worker.model, worker.loss, len(block)
    parameters = {name: model.get_parameter(name).detach() for name in weights.names}
    places = _places(model, weights)

    def row_loss(values: dict[str, Tensor], one_x: Any, one_y: Any) -> Tensor:
        placed = {place: values[name] for place, name in places.items()}
        return loss(_call_with(model, placed, one_x), one_y)

    x, y = tree_map(lambda leaf: leaf.view(rows, -1, *leaf.shape[1:]), (x, y))
    inside: list[str] = []
    handles = []
    for name, module in model.named_modules():
        label = f"{name or 'the model'} ({type(module).__name__})"
        handles.append(
            module.register_forward_pre_hook(lambda *_, label=label: inside.append(label))
        )
        # Runs only when the forward pass succeeds, so what stays on the stack has failed.
        handles.append(module.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batching rule
            gradients = vmap(grad(row_loss), in_dims=(None, 0, 0))(parameters, x, y)
    except Exception as error:  # the model is the user's: anything may come out of it
        where = f"module {inside[-1]}" if inside else "the loss"
        raise NotVectorisableError(
            f"the gradients of all rows can't be computed at once in {where}: "
            f"{reason(error).partition('. ')[0]}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    for name, _, part in weights.slices():
        block[:, part] = gradients[name].reshape(rows, -1)


def _fill_one_by_one(
    worker: Worker, weights: PrunableWeights, x: Any, y: Any, block: Tensor
) -> None:
    """A backward pass a row, into `block` (rows, p)."""
    for row, place in enumerate(block):
        place.copy_(_row(worker.model, weights, x, y, worker.loss, len(block), row))


def _places(model: nn.Module, weights: PrunableWeights) -> dict[str, str]:
    """Where each weight stands in the model, by the names that it has there; tied ones at each.

    A module that has two names is one place: who puts a tensor there twice, to take it away again
    later, is left with the wrong one.
    """
    by_weight = {id(model.get_parameter(name)): name for name in weights.names}
    return {
        f"{path}.{leaf}" if path else leaf: by_weight[id(parameter)]
        for path, module in model.named_modules()
        for leaf, parameter in module._parameters.items()
        if id(parameter) in by_weight
    }


def _call_with(model: nn.Module, values: dict[str, Tensor], x: Any) -> Any:
    """What the model makes of `x` with other tensors in some of its places."""
    args = tuple(x) if isinstance(x, (tuple, list)) else () if isinstance(x, dict) else (x,)
    kwargs = x if isinstance(x, dict) else {}
    return functional_call(model, values, args, kwargs, tie_weights=False)


# --- what went wrong ----------------------------------------------------------------------------


def blame_sample(model: nn.Module, x: Any, y: Any, loss: Loss, numbers: Tensor) -> None:
    """Raise with what is to blame for a loss that is not finite, if there is one.

    That is a tensor of the model with a NaN, or else the first sample of such a loss.
    """
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.isnan().any():
                raise NotFiniteError(f"the model's {kind} {name} holds NaN; give a model without")
    with torch.no_grad(), evaluation_mode(model):
        for i, number in enumerate(numbers.tolist()):
            one = tree_map(lambda leaf, i=i: leaf[i : i + 1], (x, y))
            value = loss(call(model, one[0]), one[1])
            if not torch.isfinite(value):
                raise NotFiniteError(
                    f"the loss of calibration sample {number} is {value.item()}; "
                    "every sample must have a finite loss"
                )


def blame_failing_sample(model: nn.Module, x: Any, y: Any, loss: Loss, numbers: Tensor) -> None:
    """Raise with the number of the first sample on which model or loss fail, if there is one."""
    for i, number in enumerate(numbers.tolist()):
        one_x, one_y = tree_map(lambda leaf, i=i: leaf[i : i + 1], (x, y))
        try:
            with torch.no_grad(), evaluation_mode(model):
                loss(call(model, one_x), one_y)
        except Exception as error:  # the model is the user's: anything may come out of it
            raise InputError(
                f"the model or the loss fails on calibration sample {number}: {reason(error)}"
            ) from error


def _blame_row(block: Tensor, numbers: Tensor) -> None:
    """Raise with the samples of the first row whose gradient is not finite, if there is one."""
    bad = torch.isfinite(block).all(dim=1).logical_not().nonzero().flatten()
    if len(bad):
        which = ", ".join(map(str, numbers[bad[0]].tolist()))
        raise NotFiniteError(
            f"the gradient of calibration sample {which} has NaN or infinite entries; "
            "every sample must have a finite gradient"
        )
