"""How models are called: inputs spread, in eval mode, images as they are fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from swap_prune.errors import InputError


def check_module(model: Any) -> None:
    """Raise unless `model` is a module whose parameters have data."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is of type {type(model).__name__}; give a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InputError(f"model's parameter {name} has no data yet: run the model once before")
        if parameter.is_meta:
            raise InputError(
                f"model's parameter {name} is on the meta device, without data: load its weights"
            )


def call(model: nn.Module, x: Any) -> Any:
    """`model(x)`, with tuples and dicts of inputs spread over the arguments."""
    if isinstance(x, dict):
        return model(**x)
    if isinstance(x, (tuple, list)):
        return model(*x)
    return model(x)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """New tensors are the CPU's, exact and can have gradients, whatever the caller told torch."""
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))  # slows down every call of torch
        if torch.is_autocast_enabled("cpu"):
            modes.enter_context(torch.autocast("cpu", enabled=False))
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients for the parameters themselves; both restored afterwards.

    And no fast path of torch's transformers, which calls none of their layers: nobody could see
    what these are given, and `vmap` can't take it.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    training = {module: module.training for module in model.modules()}
    # Tensors of inference mode can have no gradients, and refuse to be told so.
    wanted = {p: p.requires_grad for p in model.parameters() if not p.is_inference()}
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, mode in training.items():
            module.training = mode
        for parameter, mode in wanted.items():
            parameter.requires_grad_(mode)


def formatted(tree: Any, memory_format: torch.memory_format) -> Any:
    """The tree with every 4-dimensional tensor in a memory format."""
    return tree_map(
        lambda leaf: (
            leaf.contiguous(memory_format=memory_format)
            if isinstance(leaf, Tensor) and leaf.ndim == 4
            else leaf
        ),
        tree,
    )


def fastest_format(model: nn.Module, inputs: Any) -> torch.memory_format:
    """Channels last, which CPUs convolve faster, if the model can take its images so.

    Args:
        model: called once on a sample, in eval mode.
        inputs: at least one sample, samples first.
    """
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return torch.contiguous_format
    one = tree_map(lambda leaf: leaf[:1], inputs)
    with torch.no_grad(), evaluation_mode(model):
        try:
            call(model, formatted(one, torch.channels_last))
        except RuntimeError:  # `view` needs contiguous tensors
            return torch.contiguous_format
    return torch.channels_last
