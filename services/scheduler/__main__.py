"""`python -m services.scheduler --config FILE`."""

from __future__ import annotations

import sys

from services.runtime.host import serve
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService

if __name__ == "__main__":
    sys.exit(serve(SchedulerService, "scheduler", SchedulerConfig))
