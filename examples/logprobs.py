"""Three answers to one prompt, and how sure the model was of each token. Start a cluster first: `kadence up`."""

import math

from kadence import Client

with Client() as client:
    result = client.generate("My favourite colour is", max_tokens=8, temperature=1.0, seed=1, n=3, logprobs=2)

for answer in (result, *result.alternatives):
    # Log-probabilities are the model's own, before temperature and filters; their sum is that of the whole answer.
    total = sum(token.logprob for token in answer.logprobs)
    print(f"answer {answer.index} (seed {answer.seed}): {answer.text!r}, log-probability {total:.2f}")

print("answer 0, token by token:")
for token in result.logprobs:
    likeliest = ", ".join(f"{token_id} {math.exp(logprob):.0%}" for token_id, logprob in token.top)
    print(f"  {token.token_id}: {math.exp(token.logprob):.0%} (likeliest: {likeliest})")
