# SPDX-License-Identifier: Apache-2.0
"""Paths and URLs of object stores, the latter with the part of `pathlib.Path` that readers need.

    >>> location("runs/a"), location("file:///data/a")
    (PosixPath('runs/a'), PosixPath('/data/a'))
    >>> location("s3://bucket/run/") / "iter_0000010" / "index.json"
    UrlPath('s3://bucket/run/iter_0000010/index.json')

An object store has objects with long names: no directories, no rename, no fsync. Instead, a PUT makes a whole object
visible or nothing, durably, and every later read returns it. Everything built on that is in
`checkpoint/backends.py`. The stores are fsspec's; only this file knows that.

Each request is repeated a few times when the failure may be temporary. The final error is a FileNotFoundError, as for
paths, or a StorageError that names the URL and no credentials.
"""

import contextlib
import errno
import functools
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from megatron.errors import Failure, MissingPackage, StorageError, UsageError

PACKAGES = {"s3": "s3fs", "memory": "fsspec"}  # protocol -> its package
TRIES, PAUSE = 5, 0.2  # of a request; seconds before the second try, doubled before each further one
_PART = 50 << 20  # bytes of a part of an upload
_MAX_PARTS = 9000  # of an upload; S3 allows 10,000
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_FINAL = (errno.ENOSPC, errno.EDQUOT, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES)  # no retry
_LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "fsspec", "s3fs", "asyncio", "urllib3")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError")


def location(text: Union[str, os.PathLike, "UrlPath"]) -> Union[Path, "UrlPath"]:
    """A Path for a path or a `file://` URL, and a UrlPath for the URL of an object store.

    Raises UsageError for an unknown kind of URL, for a URL that contains credentials, and for a missing package.
    """
    if isinstance(text, UrlPath):
        return text
    match = _URL.match(os.fspath(text))
    if not match:
        return Path(text)
    protocol, rest = match[1].lower(), match[2]
    if protocol == "file":
        return Path(rest.removeprefix("localhost"))
    bucket = rest.partition("/")[0]
    if protocol == "hf":
        raise UsageError(
            f"{os.fspath(text)}: a model of the Hugging Face hub is no folder of checkpoints",
            do=f"import it: python -m megatron.tools.checkpoint from-hf {os.fspath(text)} OUT, then --load OUT; generate, "
            f"evaluate and serve need no import: --load-exported {os.fspath(text)}",
        )
    if protocol not in PACKAGES:
        raise UsageError(
            f"{protocol}:// is not a supported storage",
            f"known: {', '.join(PACKAGES)}, file",
            "give a folder, or an s3:// URL",
        )
    if "@" in bucket or "?" in rest:
        raise UsageError(
            f"the {protocol}:// URL has credentials or options in it, which logs would show",
            do="give only protocol://bucket/name; set credentials by AWS_ACCESS_KEY_ID, AWS_PROFILE etc., "
            "and an endpoint by AWS_ENDPOINT_URL",
        )
    if not bucket:
        raise UsageError(f"{protocol}://{rest} names no bucket", do=f"give {protocol}://bucket/name")
    _require_package(protocol)
    return UrlPath(f"{protocol}://{re.sub('/+', '/', rest).rstrip('/')}")


def local_folder(save: str) -> Path:
    """Folder of a run's local files (metrics.jsonl, logs, profiles): `--save`, or runs/<last name> of a URL.

    >>> local_folder("runs/a"), local_folder("s3://bucket/team/a")
    (PosixPath('runs/a'), PosixPath('runs/a'))
    """
    place = location(save)
    return place if isinstance(place, Path) else Path("runs") / place.name


def _require_package(protocol: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in dict.fromkeys(("fsspec", PACKAGES[protocol])) if find_spec(name) is None]
    if missing:
        raise MissingPackage(
            f"{protocol}:// needs the package {' and '.join(missing)}",
            do="pip install '.[storage]' (or -r requirements.txt)",
        )


class Stat(NamedTuple):
    """The status of an object. mark: changes with its content, "" in stores that do not have such a mark"""

    st_size: int
    st_mode: int
    st_mtime: float
    mark: str


@functools.total_ordering
class UrlPath:
    """An object, or a prefix of objects, of an object store. Its text is a URL without credentials."""

    __slots__ = ("url",)

    def __init__(self, url: str):
        self.url = url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __eq__(self, other) -> bool:
        return isinstance(other, UrlPath) and self.url == other.url

    def __lt__(self, other: "UrlPath") -> bool:
        return self.url < other.url

    def __hash__(self) -> int:
        return hash(self.url)

    # ---- names, as pathlib has them

    def __truediv__(self, name: str) -> "UrlPath":
        return UrlPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "UrlPath":
        """The prefix above; a bucket is its own parent."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith(":/") else UrlPath(above)

    def with_name(self, name: str) -> "UrlPath":
        return self.parent / name

    def resolve(self) -> "UrlPath":
        return self

    # ---- reading

    def stat(self) -> Stat:
        """Size and identity of an object. Raises FileNotFoundError if there is none."""
        info = self._ask("info")
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url)
        mark = next((info[key] for key in ("ETag", "etag", "LastModified", "mtime", "created") if key in info), "")
        written = info.get("LastModified") or info.get("created")
        return Stat(
            int(info["size"]), stat.S_IFREG | 0o444, written.timestamp() if written else 0.0, str(mark).strip('"')
        )

    def exists(self) -> bool:
        """Whether there is such an object."""
        with contextlib.suppress(FileNotFoundError):
            return bool(self.stat())
        return False

    is_file = exists

    def is_dir(self) -> bool:
        """Whether any object's name begins with this one and a slash."""
        return any(True for _ in self._listing())

    def iterdir(self) -> Iterator["UrlPath"]:
        """Objects and prefixes directly below. Raises FileNotFoundError if there are none."""
        listed = list(self._listing())
        if not listed:
            raise FileNotFoundError(errno.ENOENT, "no such prefix", self.url)
        return iter([path for path, _ in listed])

    def glob(self, pattern: str) -> list["UrlPath"]:
        """Objects and prefixes directly below with names that match a pattern without slashes."""
        assert "/" not in pattern
        return [path for path, _ in self._listing() if fnmatchcase(path.name, pattern)]

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of each object directly below, with one listing."""
        return {path.name: size for path, size in self._listing() if size is not None}

    def read_bytes(self) -> bytes:
        """The whole of a small object."""
        return self._ask("cat_file")

    def read_range(self, at: int, size: int) -> bytes:
        """Bytes [at, at + size) of an object; fewer only at its end. A truncated answer is requested again."""

        def read(files, name: str) -> bytes:
            data = files.cat_file(name, start=at, end=at + size)
            if len(data) < size:
                raise _Short(data)
            return data

        try:
            return self._try(read)
        except _Short as short:
            return short.args[0]

    def download(self, target: Path) -> None:
        """Copy the object into a local file, and flush it to the disk."""

        def fetch(files, name: str) -> None:
            with files.open(name, "rb", block_size=_PART, cache_type="readahead") as source, open(target, "wb") as file:
                while part := source.read(_PART):
                    file.write(part)
                if file.tell() < source.size:
                    raise _Short(b"")
                file.flush()
                os.fsync(file.fileno())

        try:
            self._try(fetch)
        except _Short:
            raise StorageError(f"{self} ends too early, {TRIES} times over", do="check the object store") from None

    # ---- writing

    def write_bytes(self, content: bytes) -> None:
        """Write or replace a small object, with one PUT."""
        with self._in_a_bucket():
            self._ask("pipe_file", content)

    def create(self, content: bytes) -> bool:
        """Write a small object unless there is one of this name; returns whether it was written.

        On S3 that is one request (If-None-Match), so that of several writers one succeeds. A retry after a lost answer may
        meet this call's own object: so the contents are compared.
        """
        try:
            with self._in_a_bucket():
                self._try(functools.partial(_create, content=content))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                return self.read_bytes() == content
            return False
        return True

    @contextlib.contextmanager
    def writer(self, size: int):
        """A file to write `size` bytes to, part by part. The object appears at the end, and not after an error."""
        part = max(_PART, -(-size // _MAX_PARTS))
        file = self._ask("open", "wb", block_size=part)
        try:
            with self._in_a_bucket(), _store_errors(self):
                yield file
                file.close()
        except BaseException:
            _abort(file)
            raise

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete the object. A missing one is no error: stores do not report it."""
        with contextlib.suppress(FileNotFoundError):
            self._ask("rm_file")

    # ---- inside

    @contextlib.contextmanager
    def _in_a_bucket(self):
        """A context of a write, in which "not found" means that the bucket is missing."""
        try:
            yield
        except FileNotFoundError:
            raise StorageError(
                f"{self} cannot be written: there is no such bucket", do="make it, or check the name"
            ) from None

    def _listing(self) -> list[tuple["UrlPath", Optional[int]]]:
        """(path, bytes or None for a prefix) of everything directly below, by name."""
        try:
            entries = self._ask("ls", detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        protocol, here = self.url.partition("://")[0], self.url.partition("://")[2]
        listed = []
        for entry in entries:
            name = entry["name"].strip("/")
            if name.startswith(here + "/"):  # s3fs also lists an object of exactly this name
                size = int(entry["size"]) if entry["type"] == "file" else None
                listed.append((UrlPath(f"{protocol}://{name}"), size))
        return sorted(listed, key=lambda item: item[0])

    def _ask(self, request: str, *args, **options) -> Any:
        """Send a request of fsspec for this URL, with retries."""
        return self._try(lambda files, name: getattr(files, request)(name, *args, **options))

    def _try(self, action: Callable[[Any, str], Any]) -> Any:
        protocol = self.url.partition("://")[0]
        pause = PAUSE
        for number in range(1, TRIES + 1):
            try:
                return action(filesystem(protocol, os.getpid()), self.url)
            except Exception as error:
                last = number == TRIES or not _may_pass(error)
                if last:
                    _raise(self, error, number)
            time.sleep(pause)
            pause *= 2


class Draft(UrlPath):
    """The prefix of a checkpoint that one save writes to. The names of its files contain the save's own token.

        >>> Draft("s3://b/run/iter_0000010", "5f0c") / "shard_00000.safetensors"
        UrlPath('s3://b/run/iter_0000010/shard_00000-5f0c.safetensors')

    So no save ever overwrites a file of another one: neither the same iteration saved again, nor a job that was presumed
    dead but still writes.
    """

    __slots__ = ("token",)

    def __init__(self, url: str, token: Optional[str] = None):
        super().__init__(url)
        self.token = token or secrets.token_hex(4)

    def __truediv__(self, name: str) -> UrlPath:
        stem, dot, ending = name.partition(".")
        return UrlPath(f"{self.url}/{stem}-{self.token}{dot}{ending}")

    def __reduce__(self):
        return Draft, (self.url, self.token)

    def has(self, name: str) -> bool:
        """Whether a file of this name belongs to this save."""
        return name.partition(".")[0].endswith(f"-{self.token}")


class _Short(Exception):
    """An answer with fewer bytes than requested. They are its argument."""


@functools.cache
def filesystem(protocol: str, process: int):
    """fsspec's file system, one for all threads of a process, without a cache of listings."""
    import fsspec

    return fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True)


def remove_all(paths: Iterable[UrlPath]) -> None:
    """Delete objects, many with one request where the store supports it."""
    paths = list(paths)
    if paths:
        with contextlib.suppress(FileNotFoundError):
            paths[0]._try(lambda files, _: files.rm([path.url for path in paths]))


def _create(files, name: str, content: bytes) -> None:
    try:
        files.pipe_file(name, content, mode="create")
    except OSError as error:
        if error.errno == errno.EINVAL:  # s3fs's error for 412, "precondition failed", of some stores
            raise FileExistsError(errno.EEXIST, "there is such an object", name) from None
        raise


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed a little later: after a network error, a busy store, a truncated answer."""
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)):
        return False
    if isinstance(error, (_Short, TimeoutError, EOFError)):
        return True
    if isinstance(error, OSError):
        return error.errno not in _FINAL
    return _of_library(error) and type(error).__name__ not in (*_NO_CREDENTIALS, "ParamValidationError")


def _of_library(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _LIBRARIES


def _raise(path: UrlPath, error: Exception, tries: int) -> None:
    """Raise an error for the caller: FileNotFoundError and FileExistsError as for paths, else a StorageError."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise FileNotFoundError(errno.ENOENT, "no such object", path.url) from None
    if isinstance(error, (FileExistsError, _Short, Failure)):
        raise error
    if type(error).__name__ in _NO_CREDENTIALS:
        raise StorageError(
            f"{path}: no credentials for it were found",
            without_secrets(str(error)),
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        ) from None
    if isinstance(error, PermissionError):
        raise StorageError(
            f"{path}: access is denied", without_secrets(_message(error)), "check the credentials and their permissions"
        ) from None
    if not isinstance(error, (OSError, EOFError)) and not _of_library(error):
        raise error
    raise StorageError(
        f"{path}: the object store failed: {without_secrets(_message(error))}",
        f"tried {tries} times" if tries > 1 else None,
        "check the network, the endpoint (AWS_ENDPOINT_URL) and the bucket",
    ) from None


def _message(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:500]


def without_secrets(text: str) -> str:
    """A library's message without secrets: values of environment variables, signatures, keys."""
    for name, value in os.environ.items():
        if re.search("SECRET|TOKEN|PASSWORD|ACCESS_KEY", name.upper()) and len(value) > 5:
            text = text.replace(value, "***")
    text = re.sub(r"(?i)((?:signature|credential|security-token|accesskeyid)['\"]?[=:>]\s*)[^&\s,<]+", r"\1***", text)
    return re.sub(r"\b(AKIA|ASIA)[A-Z0-9]{12,}", "***", re.sub(r"//[^/@\s]+@", "//***@", text))


@contextlib.contextmanager
def _store_errors(path: UrlPath):
    """A context that raises errors of an fsspec file like those of a request."""
    try:
        yield
    except Exception as error:
        _raise(path, error, 1)


def _abort(file) -> None:
    """Discard an upload. fsspec would complete it when the file is closed, at the latest by the garbage collector."""
    with contextlib.suppress(AttributeError):  # files in memory have no such attribute
        file.closed = True
    with contextlib.suppress(Exception):
        file.discard()
