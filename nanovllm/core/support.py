"""Which GPUs the engine supports."""

MIN_CAPABILITY = (8, 0)  # compute capability that the attention kernels need
