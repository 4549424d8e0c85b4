"""What obstore is told, from StoreOptions, the environment and the config files."""

import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.core.errors import OptionError
from penstock.files.regular import read_regular
from penstock.files.stores.clients.aws_files import read_aws_profile
from penstock.files.stores.options import StoreOptions

__all__ = ["NOWHERE", "PROXIES", "find_provider", "obstore_config"]

_S3 = ("s3", "s3a")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_ENVIRONMENT_KEYS = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
    *("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
)
"""Variables by which obstore finds credentials itself."""

PROXIES = ("AWS_PROXY_URL", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
"""Variables that name a proxy."""

NOWHERE = "127.0.0.1:0"
"""An address at which no server can be."""


def find_provider(scheme: str, options: StoreOptions) -> Callable[[], Mapping[str, Any]] | None:
    """Return who is asked for credentials; None if obstore finds them itself, or if none are sent."""
    if options.credentials is not None:
        return options.credentials
    if scheme not in _S3 or _is_anonymous(options) or any(os.environ.get(name) for name in _ENVIRONMENT_KEYS):
        return None
    return read_aws_profile().provider()


def obstore_config(scheme: str, options: StoreOptions, credentials: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keyword arguments of `obstore.store.from_url`, without those about time and credentials."""
    if scheme in _S3:
        return _s3_config(options, credentials)
    if options.region is not None:
        raise OptionError(f"region is an option of s3:// URLs, got {options.region!r} for {scheme}://.")
    if scheme in ("http", "https"):
        return _http_config(scheme, options, credentials)
    if scheme == "file":
        if options.endpoint is not None or options.credentials is not None:
            raise OptionError("endpoint and credentials are no options of file:// URLs; leave them out.")
        return {}
    config: dict[str, Any] = {"skip_signature": True} if options.anonymous else {}
    if options.endpoint is not None:
        config["base_url" if scheme == "gs" else "endpoint"] = options.endpoint
        config["client_options"] = {
            "allow_http": options.endpoint.startswith("http://"),
            **(_no_other_host(options.endpoint) if credentials is not None else {}),
        }
    return config


def _no_other_host(endpoint: str) -> dict[str, Any]:
    """Return options with which requests to any host but that of `endpoint` fail.

    obstore follows redirects, and takes a session token to the other host. Through a proxy that is nowhere, it cannot.
    """
    if any(os.environ.get(name) for name in PROXIES):  # the endpoint itself may be behind it
        return {}
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": urlsplit(endpoint).hostname or ""}


def _s3_config(options: StoreOptions, credentials: Mapping[str, Any] | None) -> dict[str, Any]:
    profile = read_aws_profile()
    endpoint = options.endpoint or next(filter(None, map(os.environ.get, _ENDPOINT_VARIABLES)), None)
    endpoint = endpoint or profile.endpoint
    region = options.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or profile.region
    config: dict[str, Any] = {}
    if endpoint is not None:
        config["endpoint"] = endpoint
    if options.endpoint and os.environ.get("AWS_ENDPOINT_URL_S3", endpoint) != endpoint:
        raise OptionError(
            f"endpoint must be that of AWS_ENDPOINT_URL_S3 if this variable is set, because obstore uses it, got "
            f"{options.endpoint!r}. Unset the variable, or leave out endpoint."
        )
    if region is not None:
        config["region"] = region
    if _is_anonymous(options):
        config["skip_signature"] = True
    client: dict[str, Any] = {"allow_http": (endpoint or "").startswith("http://")}
    if endpoint is not None and (credentials is not None or os.environ.get("AWS_ACCESS_KEY_ID")):
        client |= _no_other_host(endpoint)
    bundle = os.environ.get("AWS_CA_BUNDLE")
    if bundle:
        try:
            client["root_certificate"] = read_regular(bundle)
        except OSError as error:
            raise OptionError(f"AWS_CA_BUNDLE must name a file of certificates, got {bundle!r}.") from error
    return {**config, "client_options": client}


def _http_config(scheme: str, options: StoreOptions, credentials: Mapping[str, Any] | None) -> dict[str, Any]:
    if options.endpoint is not None:
        raise OptionError(f"endpoint is no option of {scheme}:// URLs, which name the server; leave it out.")
    client: dict[str, Any] = {"allow_http": scheme == "http"}
    if credentials is not None:
        client["default_headers"] = {
            str(name): str(value) for name, value in credentials.items() if name != "expires_at"
        }
    return {"client_options": client}


def _is_anonymous(options: StoreOptions) -> bool:
    return options.anonymous or os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes")
