"""Text as it arrives, and an answer that is given up half-way. Start a cluster first: `kadence up`."""

from kadence import Client

with Client() as client:
    # Sampling with a seed: the same seed gives the same answer, however busy the cluster is.
    with client.stream("Once upon a time", max_tokens=64, temperature=0.8, seed=7) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print()
    print(f"finished: {stream.result.finish_reason}")

    # Leaving the block early tells the server to stop; nothing is computed for nobody.
    with client.stream("Count to a thousand: 1 2 3", max_tokens=200) as stream:
        for number, _ in enumerate(stream, 1):
            if number == 3:
                break
    print("gave up after 3 chunks")
