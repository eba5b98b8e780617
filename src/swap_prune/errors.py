"""The one error a caller is expected to meet: an argument that can't be used."""


class InputError(ValueError):
    """A value given by the user can't be used; one sentence says which, and what is accepted."""
