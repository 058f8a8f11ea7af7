"""Location of a store of prefixes: a directory, or the URL of a bucket."""

from __future__ import annotations

from weft.errors import ConfigError

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")


def is_bucket(location: str) -> bool:
    return "://" in location


def check_location(location: str) -> None:
    """Raise ConfigError for a scheme that is not known, and for a URL without a bucket."""
    scheme, _, rest = location.partition("://")
    if scheme not in SCHEMES:
        raise ConfigError(
            f"--store {location}: the scheme {scheme} is not one of {', '.join(SCHEMES)}", param="--store"
        )
    if not rest.strip("/"):
        raise ConfigError(f"--store {location}: the bucket is missing; write {scheme}://BUCKET/PREFIX", param="--store")
