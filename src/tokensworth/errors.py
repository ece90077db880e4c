"""Errors that say what is wrong, where, and what to do. The command line prints them as one line."""


class TokensworthError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidGridError(TokensworthError):
    """A token grid that the stem cannot make from the image."""


class UnsupportedModelError(TokensworthError):
    """A backbone that lacks something the cascade needs."""


class CheckpointError(TokensworthError):
    """A file of weights that is missing, cut short, unsafe, or of another model."""


class DataError(TokensworthError):
    """Images or labels that cannot be used."""


class BudgetError(TokensworthError):
    """A budget or a target that no policy can meet."""


class PolicyError(TokensworthError):
    """A policy that does not fit the model or cannot be read."""


class TrainingError(TokensworthError):
    """Training that cannot go on: a loss that is not finite, a state of another run."""


class MissingExtraError(TokensworthError):
    """An optional dependency is not installed; the message names the extra."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency: pip install 'tokensworth[{extra}]'")
