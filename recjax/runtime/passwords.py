"""Passwords in URLs: recjax hides them in messages, and refuses them in configs."""

import re


def without_password(text: str) -> str:
    """The text with *** instead of the passwords in its URLs.

    Examples:
        >>> without_password("x=postgresql://me:secret@host/name?password=secret")
        'x=postgresql://me:***@host/name?password=***'
    """
    return re.sub(r"(password=)[^&\s'\"]*", r"\1***", re.sub(r"(\w://[^\s/:@]*):\S*@", r"\1:***@", text))


def has_password(text: str) -> str | None:
    """The reason why the URL of a database cannot be used; None if it has no password, or is a file."""
    if without_password(text) == text:
        return None
    return (
        "a password in a config is written to files and logs; set the environment variable PGPASSWORD, or write the"
        " password to ~/.pgpass"
    )
