"""The tools of the agents in this folder, and their reward."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract a number from another.

    Args:
        a: What to subtract from.
        b: What to subtract.
    """
    return a - b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


TOOLS = [add, subtract, multiply]


def score(answer, row):
    """1 for the number and nothing else."""
    return float(str(answer).strip() == str(row["answer"]))
