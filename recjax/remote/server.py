"""A connection to a server with OpenAI's API: requests with retries, its list of models, and API keys."""

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from recjax.errors import UserError

logger = logging.getLogger(__name__)

_MOST_WAIT = 30.0  # seconds before a request is tried again
KEY_VARIABLE = "RECJAX_API_KEY"  # environment variable with the API key, for clients and servers without a key file
_TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses that may not recur when the request is sent again


class Address(NamedTuple):
    """A server's location, and limits for requests to it.

    url: URL of the server, with or without /v1.
    model: name of the model on the server; None: its only model.
    api_key: key of the server; None: the server needs no key.
    concurrency: largest number of parallel requests.
    seconds: time limit for a complete reply.
    retries: number of retries of a request that fails for a temporary reason.
    key: the flag or config key with the URL, for messages.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    concurrency: int = 8
    seconds: float = 600.0
    retries: int = 6
    key: str = "--engine"


class UnusableError(Exception):
    """A reply is not certainly a completion of the policy; the message says why."""


class MissingChoicesError(UnusableError):
    """A reply does not have each of the requested choices once."""


class RemoteServer:
    """A server with OpenAI's API.

    Attributes:
        url: URL without /v1, for messages and for routes outside OpenAI's API.
        model: name of the model on the server.
        api: the server's software: recjax, vllm, sglang or llamacpp, or another name.
        failures: number of requests that failed for a temporary reason, retries included.
    """

    def __init__(self, address: Address):
        """Connects to the server and requests its list of models.

        Raises:
            UserError: the server does not answer, or lacks the model.
        """
        self._address = address
        self.url = address.url.rstrip("/").removesuffix("/v1")
        headers = {}
        if address.api_key:
            headers["Authorization"] = f"Bearer {address.api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=address.concurrency)
        self._client = httpx.Client(base_url=f"{self.url}/v1/", headers=headers, timeout=address.seconds, limits=limits)
        self._warned = set()
        self.failures = 0
        try:
            self.model, self.api = self._chosen_model()
        except BaseException:
            self._client.close()
            raise

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()

    @property
    def named(self) -> str:
        """The URL, after the flag or key that sets it."""
        if self._is_flag:
            return f"{self._address.key} {self._address.url}"
        return f"{self._address.key} = {self._address.url}"

    @property
    def _is_flag(self) -> bool:
        """True if a flag sets the URL, False for a config key."""
        return self._address.key == "--engine"

    def sent(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Sends a request, with retries after temporary failures, and returns the response.

        Args:
            path: path below /v1; a path that starts with a slash is below the server's root.
        Raises:
            UserError: the server does not answer, or keeps failing.
        """
        wait = 0.5
        failures = []
        tries = self._address.retries + 1
        address = path
        if path.startswith("/"):
            address = f"{self.url}{path}"
        for remaining in range(tries - 1, -1, -1):
            try:
                reply = self._client.request(method, address, json=body)
                if reply.status_code not in _TEMPORARY:
                    return reply
                failures.append(f"answers with status {reply.status_code}: {error_of(reply)[0]}")
                delay = reply.headers.get("retry-after", "")
                if delay.isdecimal():
                    wait = max(wait, float(delay))
            except httpx.UnsupportedProtocol as error:
                raise UserError(self.named, str(error), "give http://HOST:PORT") from error
            except httpx.HTTPError as error:
                failures.append(f"does not answer ({error or type(error).__name__})")
            self.failures += 1
            if remaining:
                logger.debug("%s %s; tried again in %.1f s", self.url, failures[-1], wait)
                time.sleep(min(wait, _MOST_WAIT))
                wait *= 2
        # The first failure may be the reason why the server died.
        failure = " and then ".join(dict.fromkeys([failures[0], failures[-1]]))
        raise UserError(
            self.named,
            f"the server {failure}, after {tries} tries",
            "start the same command again when the server is available",
        )

    def takes_posts(self, path: str) -> bool:
        """True if the server has a route of this path that takes only POST requests."""
        return self.sent("GET", path).status_code == 405

    def read(self, reply: httpx.Response) -> dict[str, Any]:
        """The JSON object in a response.

        Raises:
            UnusableError: a filter refuses the prompt.
            UserError: the server refuses the request, or the reply is no JSON object.
        """
        words, code = error_of(reply)
        if reply.status_code == 400 and code == "content_filter":  # Azure refuses a prompt
            raise UnusableError(f"finish_reason {code}")
        if reply.status_code in (401, 403):
            file = "rollout.engine.api_key_file"
            if self._is_flag:
                file = "--api_key_file"
            raise UserError(
                problem=f"{self.url} refuses the request ({words})",
                remedy=f"give {file}, a file with one key, or set ${KEY_VARIABLE}",
            )
        if not reply.is_success:
            raise UserError(problem=f"{self.url} refuses the request with status {reply.status_code}: {words}")
        try:
            parsed = reply.json()
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise UserError(self.url, f"a reply must be a JSON object: {words}")
        return parsed

    def warn(self, kind: str, words: str) -> None:
        """Logs a warning once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s: %s", self.url, words)

    def _chosen_model(self) -> tuple[str, str]:
        """The model's name, and the owner that the server's list of models gives it."""
        reply = self.sent("GET", "models")
        name = self._address.model
        if reply.status_code == 404 and name is not None:
            return name, ""  # the server does not list models
        models = self.read(reply).get("data")
        if not isinstance(models, list):
            models = []
        owners = {model["id"]: model.get("owned_by", "") for model in models if "id" in model}
        if name is None and len(owners) == 1:
            return next(iter(owners.items()))
        if name is not None and name in owners:
            return name, owners[name]
        key = "rollout.engine.model"
        assignment = f"{key} = {name!r}"
        if self._is_flag:
            key = "--model"
            assignment = f"{key} {name!r}"
        problem = f"give {key}"
        if name:
            problem = f"{assignment}: unknown"
        names = ", ".join(list(owners)[:20]) or "no models"
        raise UserError(self.url, problem, f"the server has {names}")


def whole_choices(reply: dict[str, Any], count: int, url: str) -> list[dict[str, Any]]:
    """The choices of a reply, in the order of their indices.

    Args:
        count: number of choices that the request asked for.
    Raises:
        MissingChoicesError: a server that drops choices drops short ones more often than long ones.
        UserError: the reply has no choices.
    """
    choices = reply.get("choices")
    if not choices:
        raise UserError(url, f"a reply has no choices: {json.dumps(reply):.200}")
    indices = [choice.get("index", position) for position, choice in enumerate(choices)]
    if len(choices) != count:
        raise MissingChoicesError(f"{len(choices)} of {count} choices")
    if sorted(map(str, indices)) != sorted(map(str, range(count))):
        raise MissingChoicesError(f"choices with indices {indices!s:.50}")
    return sorted(choices, key=lambda choice: int(choice.get("index", 0)))


def error_of(reply: httpx.Response) -> tuple[str, str | None]:
    """The start of the message in a response, and the code of its error, if it has one."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        error = reply.json()["error"]
        return str(error["message"])[:300], error.get("code")
    return reply.text[:300], None


def read_keys(file: str | None, most: int | None = None, key: str = "--api_key_file") -> tuple[str, ...]:
    """The API keys in the file of --api_key_file, one per line; without a file, the key in $RECJAX_API_KEY, if any.

    Args:
        most: largest number of keys; None: no limit.
        key: the flag or config key with the file, for messages.
    Raises:
        UserError: the file cannot be read, has no keys or too many, or has an invalid key.
    """
    if file is None:
        variable = os.environ.get(KEY_VARIABLE, "").strip()
        if not variable:
            return ()
        return (variable,)
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UserError(f"{key} {file}", f"cannot be read ({error})", "give one key per line") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    has_right_number = len(keys) > 0 and (most is None or len(keys) <= most)
    if not has_right_number or any(not api_key.isascii() or len(api_key.split()) > 1 for api_key in keys):
        number = "one or more keys, one per line"
        if most == 1:
            number = "one key"
        raise UserError(f"{key} {file}", f"takes {number}, in ASCII without spaces")
    return keys
