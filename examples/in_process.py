"""A model in this very process, without a cluster beside it: `python examples/in_process.py [MODEL]`."""

import sys

from kadence.cluster import LLM


def main(model: str = "smollm2-135m-instruct") -> None:
    """Answers a batch, then streams one answer."""
    with LLM(model) as llm:
        for result in llm.generate(["One, two, three,", "The capital of France is"], max_tokens=16):
            print(f"{result.text!r} ({result.stats.acceptance_length:.1f} tokens per step)")
        with llm.stream(messages=[{"role": "user", "content": "Say hello."}], max_tokens=16) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
            print(f" [{stream.result.finish_reason}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
