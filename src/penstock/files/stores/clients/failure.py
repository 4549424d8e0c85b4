"""What obstore's errors mean: whether to repeat a request, and one line that says why it failed."""

import os
import re

from penstock.files.stores.clients.settings import NOWHERE, PROXIES
from penstock.files.stores.errors import RequestError

__all__ = ["explain_failure"]

_STATUS = re.compile(r"status code: (\d{3})([^:]*)(?:: (.*))?", re.DOTALL)
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "token has expired", "AuthenticationFailed")
_CAUSES = (
    ("dns error", "the name of the server could not be resolved (DNS)"),
    ("ConnectionRefused", "connection refused"),
    ("ConnectionReset", "connection reset"),
    ("IncompleteBody", "the body ended early"),
    ("UnexpectedEof", "the connection was closed early"),
    ("IncompleteMessage", "the connection was closed early"),
    ("BrokenPipe", "the connection was closed early"),
    ("TimedOut", "the server did not answer in time"),
)
"""Words of obstore's internals, and what they mean: the request is repeated."""

_REFUSALS = (
    (
        f"{NOWHERE},",
        "the server redirects to another host, which must not get the credentials; pass the address of that host as "
        "StoreOptions(endpoint=...) if it is the right one",
    ),
    ("Range request not supported", "the server sends no parts of files (range requests)"),
    ("non-partial response", "the server sends no parts of files (range requests)"),
    ("incorrectly configured region", "the bucket is in another region; pass StoreOptions(region=...)"),
    ("InvalidCertificate", "the certificate of the server is not trusted"),
    ("UnknownIssuer", "the certificate of the server is not trusted"),
)
"""Words of obstore's messages, and what they mean: the request would fail again."""

_NO_CREDENTIALS = (
    "no credentials were found. Set {variables}, pass StoreOptions(credentials=...), or "
    "StoreOptions(anonymous=True) for a public bucket"
)
_AWS_VARIABLES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE"


def explain_failure(error: Exception) -> RequestError:
    """Return what an error of obstore means."""
    head, _, internals = str(error).partition("\n\nDebug source:")
    if "169.254.169.254" in head or "169.254.170.2" in head:  # asked last, by a machine that is none of the cloud
        variables = _AWS_VARIABLES if " S3 " in head else "the variables of the storage"
        return RequestError("refused", _NO_CREDENTIALS.format(variables=variables))
    if isinstance(error, FileNotFoundError):
        return RequestError("missing", "there is no such object")
    found = _STATUS.search(head)
    if found is not None:
        return _explain_status(int(found[1]), f"{found[1]}{found[2]}".strip(), found[3] or "")
    refusal = next((meaning for words, meaning in _REFUSALS if words in str(error)), None)
    if refusal is not None:
        return RequestError("refused", refusal)
    if "HTTP error" in head or "Got invalid" in head:
        default = "the answer was not whole" if "Got invalid" in head else "the connection failed"
        return RequestError(
            "again", next((meaning for word, meaning in _CAUSES if word in internals), default) + _proxy()
        )
    return RequestError("refused", _one_line(head))


def _proxy() -> str:
    """Return which variable names a proxy, through which the request may have gone; empty if none does."""
    found = next((name for name in PROXIES if os.environ.get(name)), None)
    return f" ({found} is set: a proxy may be in between; NO_PROXY names servers without one)" if found else ""


def _explain_status(status: int, shown: str, body: str) -> RequestError:
    code, message = _tag("Code", body), _tag("Message", body)
    reason = f"the server answered {shown}" + f" ({': '.join(filter(None, (code, message)))})" * bool(code)
    if any(word in body for word in _EXPIRED):
        return RequestError("expired", f"the credentials have expired ({code or shown})")
    if status == 429 or code in ("SlowDown", "TooManyRequests", "ServerBusy"):
        return RequestError("slow", reason)
    if status >= 500 and status != 501:
        return RequestError("slow" if status == 503 else "again", reason)
    if status in (408, 425) or code in ("RequestTimeout", "BadDigest", "IncompleteBody", "OperationAborted"):
        return RequestError("again", reason)
    if status in (401, 403):
        return RequestError("refused", f"{reason}; check the credentials and their permissions")
    return RequestError("refused", reason)


def _tag(name: str, body: str) -> str:
    """Return an element of an answer. Others may quote the signature of the request."""
    found = re.search(rf"<{name}>([^<]*)</?{name}", body)
    return _one_line(found[1]) if found else ""


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().rstrip(".")[:200]
