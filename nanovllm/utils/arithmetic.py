"""Integer division that rounds up, sizes as text, and constants of an activation."""

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of the activation "clamped_swiglu"; constants in transformers (GptOssExperts)


def ceil_div(dividend: int, divisor: int) -> int:
    """Return dividend / divisor, rounded up."""
    return -(-dividend // divisor)


def format_bytes(num_bytes: float) -> str:
    """Return the size in the largest binary unit, up to GiB, that gives at least 1, for example `4.70 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
