"""Errors of data and models with which no run can begin, by the code of their cause."""


class Refusal(ValueError):
    """A model, tokenizer or row with which a run cannot begin; `code` is that of `covey doctor`'s finding."""

    def __init__(self, message: str = "", code: str = ""):
        super().__init__(message)
        self.code = code
