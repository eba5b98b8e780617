"""The errors a caller is expected to meet."""


class InputError(ValueError):
    """A value given by the user can't be used; one sentence says which, and what is accepted."""


class DivergedError(InputError):
    """After a stage that seemed to be in order, losses, gradients or weights are not finite."""
