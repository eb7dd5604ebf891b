"""What the served module imports, and does not let others call."""


def imported() -> None:
    pass
