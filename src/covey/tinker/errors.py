"""Refusals: requests that cannot be served, in one sentence with advice."""


class Refusal(ValueError):
    """A request that the user can correct. `status` is the HTTP status where it is answered at once."""

    def __init__(self, text: str, status: int = 400):
        super().__init__(text)
        self.status = status
