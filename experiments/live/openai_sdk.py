"""Asks a running server with OpenAI's own SDK: whole and streamed replies, choices, log-probs, tools, sessions, errors.

    pip install openai                                      # in any environment
    python -m recjax.serve --model smollm2 --name smollm2   # in another terminal
    python experiments/live/openai_sdk.py http://127.0.0.1:8000

It ends with an error at the first reply that is not as it should be. Works with any model that has a chat template.
"""

import sys

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
SEA = [{"role": "user", "content": "Write a line about the sea."}]


def main(address: str) -> None:
    """Asks for one thing after another."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    (model,) = client.models.list().data
    print(f"model {model.id}")
    options = {"model": model.id, "messages": SEA, "max_tokens": 40, "seed": 1}

    whole = client.chat.completions.create(
        **options, n=2, logprobs=True, metadata={"by": "sdk"}, extra_body={"return_token_ids": True}
    )
    for choice in whole.choices:
        assert len(choice.token_ids) == len(choice.logprobs.content) == len(choice.token_logprobs)
        print(f"choice {choice.index}, {choice.finish_reason}: {choice.message.content!r:.70}")
    assert whole.prompt_token_ids and whole.usage.completion_tokens == sum(len(one.token_ids) for one in whole.choices)

    texts, usage, count = ["", ""], None, 0
    stream = client.chat.completions.create(**options, n=2, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        count += 1
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices], "the stream says the same"
    assert usage.total_tokens == whole.usage.total_tokens
    print(f"streamed the same in {count} chunks")

    stopped = client.chat.completions.create(**options, stop=[" "])
    assert " " not in stopped.choices[0].message.content and stopped.choices[0].finish_reason == "stop"
    legacy = client.completions.create(
        model=model.id, prompt="Once upon a time", max_tokens=8, logprobs=0, temperature=0
    )
    assert len(legacy.choices[0].logprobs.token_logprobs) == legacy.usage.completion_tokens
    print(f"completion: {legacy.choices[0].text!r}")

    asked = [{"role": "user", "content": "What is 2 + 3? Call the function add."}]
    called = client.chat.completions.create(**options | {"messages": asked}, tools=TOOLS, temperature=0)
    message = called.choices[0].message
    print(f"tools: {called.choices[0].finish_reason}: {message.tool_calls or message.content!r:.100}")

    session = openai.OpenAI(base_url=f"{address}/sessions/sdk-{whole.id}/v1", api_key="none")
    messages = list(SEA)
    for _ in range(2):
        turn = session.chat.completions.create(**options | {"messages": messages})
        print(f"turn: {client.post('/feedback', body={'id': turn.id, 'reward': 0.25}, cast_to=object)}")
        messages += [
            turn.choices[0].message.model_dump(include={"role", "content"}),
            {"role": "user", "content": "Go on."},
        ]
    given = client.post(f"{address}/sessions/sdk-{whole.id}/reward", body={"reward": 1.0}, cast_to=object)
    print(f"session: {given}")
    print(f"feedback: {client.post('/feedback', body={'id': whole.id, 'index': 1, 'reward': 0.5}, cast_to=object)}")
    for error, changes in ((openai.BadRequestError, {"temperature": -1}), (openai.NotFoundError, {"model": "other"})):
        try:
            client.chat.completions.create(**options | changes)
        except error as raised:
            print(f"{type(raised).__name__}: {raised.body['message']}")
        else:
            raise AssertionError(f"{changes} was not refused")
    print("all as it should be")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
