"""One prompt, one answer. Start a cluster first: `kadence up`."""

from kadence import Client

with Client() as client:  # finds the cluster that `kadence up` started; Client("host:port") is another one
    result = client.generate("The capital of France is", max_tokens=32)

print(result.text)
print(f"{len(result.token_ids)} tokens, ended by {result.finish_reason}")
# How much speculation helped: tokens per step of the big model, its own one included.
print(f"acceptance length {result.stats.acceptance_length:.2f} over {result.stats.steps} steps")
