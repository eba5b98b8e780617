"""The gradient matrix `G` (n × p) as an operator: what the rest of the library sees of it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from swap_prune.errors import InputError


class GradientOperator(ABC):
    """`G`, whose row i is the gradient of the loss of the i-th calibration row.

    The checks live here, so that a backend is only its product, its adjoint and its columns.

    Attributes:
        shape: (n, p), rows and prunable weights.
    """

    shape: tuple[int, int]

    def __matmul__(self, w: Tensor) -> Tensor:
        """`G w` (n,) for a vector `w` (p,)."""
        self._check_vector(w, self.shape[1])
        return self._product(w)

    @property
    def T(self) -> Adjoint:  # noqa: N802 - the name every array library uses
        """The adjoint, so that `G.T @ v` reads as in the paper."""
        return Adjoint(self)

    @abstractmethod
    def columns(self, support: Tensor, out: Tensor | None = None) -> GradientOperator:
        """`G_S`: the restriction to the columns `support` (s,), sorted indices into p.

        `out` is a matrix (n, s) that a copy may be written into; what needs no copy is not.
        """

    @abstractmethod
    def gram(self) -> Tensor:
        """`G Gᵀ` (n, n) in float64."""

    @abstractmethod
    def rows(self) -> Tensor:
        """The matrix itself (n, p), where the backend holds it."""

    @abstractmethod
    def _product(self, w: Tensor) -> Tensor: ...

    @abstractmethod
    def _adjoint_product(self, v: Tensor) -> Tensor: ...

    def _check_vector(self, vector: Tensor, size: int) -> None:
        if vector.shape != (size,):
            raise InputError(
                f"a product with G of shape {self.shape} takes a vector of {size} entries, "
                f"not a tensor of shape {tuple(vector.shape)}"
            )


class Adjoint:
    """`Gᵀ`, a view of an operator."""

    def __init__(self, operator: GradientOperator) -> None:
        self.operator = operator
        self.shape = operator.shape[::-1]

    def __matmul__(self, v: Tensor) -> Tensor:
        """`Gᵀ v` (p,) for a vector `v` (n,)."""
        self.operator._check_vector(v, self.operator.shape[0])
        return self.operator._adjoint_product(v)
