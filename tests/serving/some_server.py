"""A server of a tiny policy that knows printable characters, in this process."""

import contextlib
import functools
import json
import socket
import threading
from pathlib import Path

from starlette.testclient import TestClient

from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.models.sampling import TokenRecord
from recjax.rollout.requests import Weights
from recjax.serving.guards import Guarded
from recjax.serving.recorder import Recording
from recjax.serving.running import Serving, build_server, uvicorn_server
from recjax.serving.sampler import Limits
from tests.tiny import params_of

TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
TOKENIZER.chat_template = (
    "{% if tools %}{{ tools | length }} tools.{% endif %}{% if enable_thinking is false %}Brief.{% endif %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "[assistant:"
)
SHAPE = DecoderConfig(len(TOKENIZER), 16, 32, 1, 2, 1, 8)
POLICY = Policy(Decoder(SHAPE), TOKENIZER, (TOKENIZER.eos_token_id,), recording=TokenRecord(5, top_k=3))
LIMITS = Limits(context=200, completion=100, slots=4, queue=8, distributions=4)


@functools.cache
def initial():
    """The weights that a server begins with."""
    return params_of(SHAPE)


def serving(
    folder, limits=LIMITS, guarded=None, seed=1, policy=POLICY, params=None, newer=None, pushed=None, **recording
):
    """What a server is made of; it records in that file, folder or URL, unless it is None."""
    folder = folder / "store.db" if isinstance(folder, Path) and folder.is_dir() else folder
    recording = Recording(str(folder), "tiny", **recording) if folder else None
    weights = Weights(initial() if params is None else params, 3)
    return Serving("tiny", policy, weights, limits, guarded or Guarded(), recording, seed, newer, pushed)


@contextlib.contextmanager
def serve(folder, **options):
    """A client of a server that ends with the block, and then writes its store."""
    with TestClient(build_server(serving(folder, **options), "ready").app) as client:
        yield client


@contextlib.contextmanager
def listening(folder, **options):
    """A server on a port of this machine: its port, and the server."""
    server = build_server(serving(folder, **options), "ready")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        runs = uvicorn_server(server.app, options.get("guarded") or Guarded(), lifespan="on")
        thread = threading.Thread(target=runs.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1], server
        finally:
            runs.should_exit = True
            thread.join()


def post(client, path, status=200, **body):
    """The reply to a request, which has that status."""
    reply = client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def chunks(client, path, **body):
    """The chunks of a stream that ends as it should."""
    reply = client.post(path, json={"stream": True, **body})
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply.text
    *events, last, end = reply.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
