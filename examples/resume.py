"""A stream that breaks goes on where it stood. Needs no cluster: a fake one breaks the stream on purpose.

The same happens when a real scheduler is killed and started again, or a connection is lost.
"""

from kadence import Client, RetryConfig
from kadence.testing import FakeGateway

TEXT = "Streams break. Answers need not: the client holds the tokens, and the next stream goes on from there. ✓"

with FakeGateway({"Why?": TEXT}) as gateway:
    gateway.break_off(20, 30)  # the first stream breaks after 20 tokens, the second after 30 more

    # For how long a broken stream is tried again; 0 would raise UnavailableError at once.
    patient = RetryConfig(resume_seconds=60.0)
    with Client(gateway.endpoint, retry=patient) as client, client.stream("Why?") as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print()

assert stream.result.text == TEXT
print(f"the stream was resumed {stream.resumes} times; nothing is missing and nothing came twice")
