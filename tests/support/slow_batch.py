"""`nanovllm batch` whose units after the first few take 20 s longer, so that a test can end the command in time."""

import sys
from functools import partial

from batch_jobs import SlowUnits

from nanovllm.entrypoints.cli import main
from nanovllm.entrypoints.cluster import batch_job

if __name__ == "__main__":
    batch_job.BatchJob = partial(batch_job.BatchJob, engine_class=SlowUnits)  # type: ignore[assignment,misc]
    sys.exit(main.main(sys.argv[1:]))
