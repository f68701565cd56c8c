"""The process shell the services share; it knows no tokens."""

import os

# gRPC's C core writes lines of its own to stderr whenever a peer goes away; read once, when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
