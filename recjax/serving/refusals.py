"""Refusals in the form of OpenAI's API: a status, and an error object with message, type, param and code."""

from typing import Any

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A request that the server refuses.

    Args:
        status: HTTP status.
        message: problem and remedy.
        param: key of the request that caused the refusal.
        code: short error code for programs.
        headers: headers of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        kind = _TYPES.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
