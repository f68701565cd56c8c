"""`python -m services.verifier`: one verifier replica as a process."""

import sys

from services.runtime.host import serve
from services.verifier.config import VerifierConfig
from services.verifier.service import VerifierService

if __name__ == "__main__":
    sys.exit(serve(VerifierService, "verifier", VerifierConfig))
