"""A conversation in the terminal, one line a turn, until the input ends. Start a cluster first: `kadence up`."""

import sys

from kadence import APIError, Client, Message

SYSTEM = Message("system", "You answer in one short sentence.")

with Client() as client:
    talk = [SYSTEM]
    print("you> ", end="", flush=True)
    for line in sys.stdin:
        if line.strip():
            asked = Message("user", line.strip())
            try:
                # The whole conversation goes along each time; the server keeps nothing between requests.
                with client.stream(messages=[*talk, asked], max_tokens=48) as stream:
                    for chunk in stream:
                        print(chunk.text, end="", flush=True)
                talk += [asked, Message("assistant", stream.result.text)]
                print()
            except APIError as error:  # such as a conversation that has outgrown the context
                print(f"\n({error})")
        print("you> ", end="", flush=True)
    print()
