"""The errors a caller is expected to meet."""


class InputError(ValueError):
    """A value given by the user can't be used; one sentence says which, and what is accepted."""


class NotFiniteError(InputError):
    """The loss or the gradient of a sample is NaN or infinite."""


class DivergedError(InputError):
    """Pruning or training has led to losses, gradients or weights that are not finite."""
