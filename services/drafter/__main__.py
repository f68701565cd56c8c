"""`python -m services.drafter`: one drafter replica as a process."""

import sys

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.runtime.host import serve

if __name__ == "__main__":
    sys.exit(serve(DrafterService, "drafter", DrafterConfig))
