"""Many requests at once from one event loop, a few at a time. Start a cluster first: `kadence up`."""

import asyncio

from kadence import AsyncClient, OverloadedError

PROMPTS = [f"The square of {number} is" for number in range(1, 13)]
AT_ONCE = 8


async def main() -> None:
    places = asyncio.Semaphore(AT_ONCE)

    async with AsyncClient() as client:  # one connection carries all of them

        async def ask(prompt: str) -> str:
            async with places:
                try:
                    result = await client.generate(prompt, max_tokens=16)
                except OverloadedError as error:  # the client has waited and tried again already; see RetryConfig
                    return f"(no room, try in {error.retry_after:.0f} s)"
                return result.text

        for prompt, text in zip(PROMPTS, await asyncio.gather(*map(ask, PROMPTS)), strict=True):
            print(f"{prompt} {text!r}")


asyncio.run(main())
