"""Integer arithmetic that Python has no name for."""


def ceil_div(dividend: int, divisor: int) -> int:
    """dividend / divisor, rounded up."""
    return -(-dividend // divisor)
