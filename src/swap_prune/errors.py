"""The errors a caller is expected to meet."""


class InputError(ValueError):
    """A value given by the user can't be used; one sentence says which, and what is accepted."""


def reason(error: BaseException) -> str:
    """What somebody else's code raised, on one line."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


class NotFiniteError(InputError):
    """The loss or the gradient of a sample is NaN or infinite."""


class DivergedError(InputError):
    """Pruning or training has led to losses, gradients or weights that are not finite."""
