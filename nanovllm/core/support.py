"""The GPUs that the engine supports."""

MIN_CAPABILITY = (8, 0)  # what the attention kernels need
