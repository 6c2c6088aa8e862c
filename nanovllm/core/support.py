"""Which GPUs the engine supports, and what its kernels can do."""

MIN_CAPABILITY = (8, 0)  # compute capability that the attention kernels need
MAX_DECODE_QUERIES = 16  # of one sequence, in the kernel that splits a sequence's keys among programs
