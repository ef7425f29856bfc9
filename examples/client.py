"""Ask a server with OpenAI's API, and print the answer as it comes. Python alone: no SDK.

ggpy serve smollm2 &                                   # or llama-server, or another one
python examples/client.py "Why is the sky blue?"
python examples/client.py "Hello" --url http://127.0.0.1:8080 --key KEY --system "Be brief."
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen


def main() -> int:
    """Run the example; its exit status."""
    options = parse()
    messages = [{"role": "user", "content": options.question}]
    if options.system:
        messages.insert(0, {"role": "system", "content": options.system})
    body = {"messages": messages, "max_tokens": options.max_tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    try:
        show(events(options.url + "/v1/chat/completions", body, options.key))
    except HTTPError as error:  # the server says what is wrong
        print(json.load(error)["error"]["message"], file=sys.stderr)
        return 1
    except (URLError, RuntimeError) as error:
        print(f"{options.url}: {error}", file=sys.stderr)
        return 1
    return 0


def show(chunks: Iterator[dict[str, Any]]) -> None:
    """Print the text of an answer, then its figures."""
    start, first, n_tokens = time.perf_counter(), 0.0, 0
    for chunk in chunks:
        if usage := chunk.get("usage"):
            n_tokens = usage["completion_tokens"]
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                first = first or time.perf_counter() - start
                print(text, end="", flush=True)
    seconds = time.perf_counter() - start
    print(f"\n\n{n_tokens} tokens in {seconds:.2f} s, the first after {first:.2f} s")


def events(url: str, body: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer. HTTPError, URLError; RuntimeError for an error within it."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=600) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if not line.startswith(b"data: "):  # an empty line, or a comment while nothing comes
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            yield chunk


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ask a server with OpenAI's API.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="of the server")
    parser.add_argument("--key", default="none", help="the server's API key, if it has one")
    parser.add_argument("--system", default="", help="the system message")
    parser.add_argument("-n", "--max-tokens", type=int, default=200, help="of the answer at most")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
