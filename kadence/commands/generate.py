"""`kadence generate`: one request; its text live on stdout, or one JSON object."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from kadence import ConfigError, GenerateResult, SamplingOptions, Stream, TokenLogprobs
from kadence.commands import connection


class _Ids(argparse.Action):
    """A comma-separated list; one that is wrong ends the process with one line and exit status 2."""

    form = "token ids, comma-separated"

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            setattr(namespace, self.dest, self.parse(values))
        except ValueError:
            shown = repr(values) if len(values) <= 60 else repr(values[:57] + "...")
            parser.exit(2, f"kadence: {option_string}: {shown}; {self.form}\n")

    def parse(self, text: str) -> Any:
        return [int(item) for item in text.split(",")]


class _Bias(_Ids):
    form = "ID=X pairs, comma-separated"

    def parse(self, text: str) -> Any:
        pairs = (item.split("=", 1) for item in text.split(","))
        return {int(index): float(value) for index, value in pairs}


_INT, _FLOAT = {"type": int, "metavar": "N"}, {"type": float, "metavar": "X"}
# Every sampling option, in the order of the help, with what argparse must know about it.
_SAMPLING: dict[str, dict[str, Any]] = {
    "max_tokens": {**_INT, "help": "tokens to produce"},
    "min_tokens": {**_INT, "help": "no end before this many tokens"},
    "temperature": {**_FLOAT, "help": "0 is greedy (default: the model's, else 0)"},
    "top_p": {**_FLOAT, "help": "nucleus mass in (0, 1]"},
    "top_k": {**_INT, "help": "keep the k likeliest tokens; 0 keeps all"},
    "min_p": {**_FLOAT, "help": "drop tokens below this share of the best one's probability"},
    "seed": {**_INT, "help": "noise seed; the same seed gives the same answer"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end before this text; may be repeated"},
    "stop_token_ids": {"action": _Ids, "metavar": "IDS", "help": "end with one of these ids, comma-separated"},
    "ignore_eos": {"action": "store_true", "default": None, "help": "go on past the end of sequence"},
    "rule": {"choices": ("match", "ratio"), "help": "acceptance rule (default match)"},
    "max_draft_tokens": {**_INT, "help": "most draft tokens verified per step; 0 switches speculation off"},
    "repetition_penalty": {**_FLOAT, "help": "divides the logits of tokens already seen"},
    "presence_penalty": {**_FLOAT, "help": "subtracted once from the logits of tokens produced"},
    "frequency_penalty": {**_FLOAT, "help": "subtracted per occurrence from the logits of tokens produced"},
    "logit_bias": {"action": _Bias, "metavar": "ID=X,...", "help": "added to the logits of these ids"},
    "allowed_token_ids": {"action": _Ids, "metavar": "IDS", "help": "only these ids may be produced, comma-separated"},
    "bad_words": {"action": "append", "metavar": "TEXT", "help": "never produce this text; may be repeated"},
    "n": {**_INT, "help": "answers to the prompt, printed one after the other (default 1)"},
    "logprobs": {**_INT, "help": "log-probabilities of each token and of the N likeliest ones (with --json)"},
    "priority": {**_FLOAT, "help": "weight of this request when rows are scarce; no policy so far uses it"},
}


def register(subparsers: Any) -> None:
    """Adds the parser of `kadence generate`."""
    parser = subparsers.add_parser("generate", help="send one request and print the answer")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="plain text, completed as it stands")
    source.add_argument(
        "--messages-json", metavar="JSON", help='a conversation: [{"role": ..., "content": ...}, ...]; "-" reads stdin'
    )
    source.add_argument("--prompt-token-ids", action=_Ids, metavar="IDS", help="token ids, comma-separated")
    parser.add_argument("--system", metavar="TEXT", help="system message; makes --prompt the user's message of a chat")
    parser.add_argument("--chat", action="store_true", help="send --prompt as the user's message of a chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object, when the answer is complete")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print text as it arrives (default, for one answer)",
    )
    parser.add_argument("--stats", action="store_true", help="also print the statistics, on stderr")
    parser.add_argument("--model", default="", help="served model name (default: the only one)")
    parser.add_argument(
        "--request-id", default="", metavar="ID", help="shows in the logs (default: the server chooses)"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds for the whole request (default 300)")
    connection.add_flags(parser)
    sampling = parser.add_argument_group("sampling (default: the server's)")
    for name, settings in _SAMPLING.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", **settings)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sends the request that `args` describes. Raises KadenceError."""
    options = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    prompt, messages = _conversation(args)
    with connection.connect(args) as client:
        stream = client.stream(
            prompt,
            messages=messages,
            prompt_token_ids=args.prompt_token_ids,
            model=args.model,
            request_id=args.request_id,
            timeout=args.timeout,
            **_sampling(options),
        )
        live = args.stream and not args.json and (args.n or 1) == 1
        with stream:
            result = _show(stream, live)
    if args.json:
        print(json.dumps(as_json(result, stream.resumes)))
    elif not live:
        print(_texts(result))
    if args.stats:
        print("\n".join(_summary(answer) for answer in _answers(result)), file=sys.stderr)
    return 0


def as_json(result: GenerateResult, resumes: int = 0) -> dict[str, Any]:
    """The object that --json prints: answer 0, and in `alternatives` the others."""
    alternatives = [_answer_json(answer) for answer in result.alternatives]
    return {**_answer_json(result), "alternatives": alternatives, "resumes": resumes}


def _answer_json(result: GenerateResult) -> dict[str, Any]:
    stats = result.stats
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "logprobs": [_logprobs_json(item) for item in result.logprobs],
        "stats": {
            "steps": stats.steps,
            "drafted": stats.drafted,
            "verified": stats.verified,
            "accepted": stats.accepted,
            "acceptance_length": stats.acceptance_length,
            "k_hist": list(stats.k_hist),
            "cached_tokens": stats.cached_tokens,
        },
    }


def _logprobs_json(item: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": value} for token, value in item.top]
    return {"token_id": item.token_id, "logprob": item.logprob, "top": top}


def _answers(result: GenerateResult) -> tuple[GenerateResult, ...]:
    return (result, *result.alternatives)


def _texts(result: GenerateResult) -> str:
    """The text, or each answer's under a line with its number."""
    if not result.alternatives:
        return result.text
    return "\n".join(f"--- answer {answer.index}\n{answer.text}" for answer in _answers(result))


def _show(stream: Stream, live: bool) -> GenerateResult:
    """Runs the stream to its end; with `live`, its text goes to stdout, and a newline even if it breaks off."""
    wrote = False
    try:
        for chunk in stream:
            if live and chunk.text:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                wrote = True
        return stream.result
    finally:
        if wrote:
            print(flush=True)


def _summary(result: GenerateResult) -> str:
    stats = result.stats
    return (
        f"{len(result.token_ids)} tokens, {result.finish_reason}; {stats.steps} steps, drafted {stats.drafted}, "
        f"verified {stats.verified}, accepted {stats.accepted}, acceptance length {stats.acceptance_length:.2f}"
    )


def _conversation(args: argparse.Namespace) -> tuple[str | None, list[Any] | None]:
    """(prompt, messages), one of them None, or both for token ids. Raises ConfigError for JSON that is no list."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    if args.messages_json is not None:
        text = sys.stdin.read() if args.messages_json == "-" else args.messages_json
        try:
            messages = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--messages-json: not JSON ({error})") from error
        if not isinstance(messages, list):
            raise ConfigError("--messages-json: must be a list of objects with role and content")
        return None, system + messages
    if args.prompt is not None and (system or args.chat):
        return None, [*system, {"role": "user", "content": args.prompt}]
    if system:
        raise ConfigError("--system goes with --prompt or --messages-json")
    return args.prompt, None


def _sampling(options: dict[str, Any]) -> SamplingOptions:
    return SamplingOptions(**options)  # type: ignore[typeddict-item]
