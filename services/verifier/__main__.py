"""`python -m services.verifier`: one verifier replica as a process."""

import sys

from services.runtime.threads import set_waiting

set_waiting()  # before torch is imported

from services.runtime.host import serve  # noqa: E402
from services.verifier.config import VerifierConfig  # noqa: E402
from services.verifier.service import VerifierService  # noqa: E402

if __name__ == "__main__":
    sys.exit(serve(VerifierService, "verifier", VerifierConfig))
