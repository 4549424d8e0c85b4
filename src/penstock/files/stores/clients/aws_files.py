"""What ~/.aws/config and ~/.aws/credentials say; obstore reads only the environment."""

import configparser
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.core.errors import OptionError
from penstock.core.text import cause
from penstock.files.regular import read_regular

__all__ = ["AwsProfile", "read_aws_profile"]

_ELSEWHERE = ("role_arn", "sso_start_url", "sso_session", "credential_process", "web_identity_token_file")
"""Settings of a profile whose keys must be asked for, which boto3 does."""


class AwsProfile:
    """Region, endpoint and keys of the profile that AWS_PROFILE names, or of `default`."""

    def __init__(self, name: str, values: dict[str, str]) -> None:
        self._name, self._values = name, values

    @property
    def region(self) -> str | None:
        """Region, if there is one."""
        return self._values.get("region")

    @property
    def endpoint(self) -> str | None:
        """Address of the server, if there is one."""
        return self._values.get("endpoint_url")

    def provider(self) -> Callable[[], dict[str, Any]] | None:
        """Return a function that returns the keys of the profile; None if it has none."""
        values = self._values
        if "aws_access_key_id" in values and "aws_secret_access_key" in values:
            # Read again each time: a tool may have renewed them.
            return lambda: _static_keys(read_aws_profile()._values)
        if not any(name in values for name in _ELSEWHERE):
            return None
        try:
            boto3: Any = import_module("boto3")
        except ImportError as error:
            raise OptionError(
                f"The AWS profile {self._name!r} gets its keys by a role, by SSO or by a program, for which boto3 is "
                "needed: pip install boto3. Or pass StoreOptions(credentials=...)."
            ) from error
        return lambda: _boto3_keys(boto3, self._name)


def read_aws_profile() -> AwsProfile:
    """Read the profile from the files that AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE name, or those in ~/.aws."""
    name = os.environ.get("AWS_PROFILE") or "default"
    section = name if name == "default" else f"profile {name}"
    config = _read_section("AWS_CONFIG_FILE", "config", section)
    keys = _read_section("AWS_SHARED_CREDENTIALS_FILE", "credentials", name)
    if config is None and keys is None and name != "default":
        raise OptionError(f"AWS_PROFILE must name a profile of ~/.aws/config or ~/.aws/credentials, got {name!r}.")
    return AwsProfile(name, {**(config or {}), **(keys or {})})


def _read_section(variable: str, file: str, section: str) -> dict[str, str] | None:
    path = Path(os.environ.get(variable) or Path.home() / ".aws" / file).expanduser()
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(read_regular(path).decode())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        # Not the text of the line: it may be a key.
        said = cause(error) if isinstance(error, OSError) else type(error).__name__
        raise OptionError(f"{path} must be a config file of AWS, but could not be read: {said}.") from error
    return dict(parser[section]) if parser.has_section(section) else None


def _static_keys(values: dict[str, str]) -> dict[str, Any]:
    token = values.get("aws_session_token")
    keys = {"access_key_id": values["aws_access_key_id"], "secret_access_key": values["aws_secret_access_key"]}
    return {**keys, "token": token} if token else keys


def _boto3_keys(boto3: Any, name: str) -> dict[str, Any]:
    found = boto3.Session(profile_name=name).get_credentials().get_frozen_credentials()
    return {"access_key_id": found.access_key, "secret_access_key": found.secret_key, "token": found.token}
