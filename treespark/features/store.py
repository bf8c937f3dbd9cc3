"""A folder of shards with an index: what it was built for, what it holds, whether it is finished."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from treespark.features.identity import FeatureIdentity, describe_differences
from treespark.features.shards import FORMAT, HEADER_BYTES, KEY_BYTES, Shard, write_whole

INDEX = "index.json"
_RENDERING = {"chat_template": "chat template", "max_length": "max_length", "long_sequences": "long_sequences"}
_CONTENT = {
    "num_documents": "the number of documents",
    "num_tokens": "the number of tokens",
    "documents_sha256": "the documents' tokens (data files, chat template or lengths)",
    "num_shards": "the number of shards (shard_mib)",
}


@dataclass(frozen=True)
class Layout:
    """Which documents stand in which shard: a function of their order and lengths alone.

    Attributes:
        keys: Address of each document, in order.
        lengths: Its tokens.
        bounds: First document of each shard, and the number of documents.
        bytes_per_token: Of the stored features.
    """

    keys: list[bytes]
    lengths: list[int]
    bounds: list[int]
    bytes_per_token: int

    @classmethod
    def of(cls, keys: Sequence[bytes], lengths: Sequence[int], bytes_per_token: int, shard_bytes: int) -> Layout:
        """Fills shards in order, each up to `shard_bytes` or with one document that is longer."""
        bounds, size = [0], 0
        for number, length in enumerate(lengths):
            added = length * bytes_per_token + KEY_BYTES
            if size and size + added > shard_bytes:
                bounds.append(number)
                size = 0
            size += added
        return cls(list(keys), list(lengths), [*bounds, len(lengths)] if lengths else [0], bytes_per_token)

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self.bounds) - 1

    def documents(self, shard: int) -> range:
        """Numbers of the documents in a shard."""
        return range(self.bounds[shard], self.bounds[shard + 1])

    def num_tokens(self, shards: Sequence[int]) -> int:
        """Tokens of some shards."""
        return sum(self.lengths[number] for shard in shards for number in self.documents(shard))

    def num_bytes(self, shards: Sequence[int]) -> int:
        """Bytes that some shards take on disk, to about a hundred each."""
        fixed = sum(HEADER_BYTES + KEY_BYTES * len(self.documents(shard)) for shard in shards)
        return self.num_tokens(shards) * self.bytes_per_token + fixed

    def content(self) -> dict[str, Any]:
        """What the index says of the documents."""
        return {
            "num_documents": len(self.keys),
            "num_tokens": sum(self.lengths),
            "documents_sha256": hashlib.sha256(b"".join(self.keys)).hexdigest(),
            "num_shards": self.num_shards,
        }

    @staticmethod
    def file(shard: int) -> str:
        """Name of a shard's file."""
        return f"shard-{shard:05d}.safetensors"


@dataclass(frozen=True)
class CacheIndex:
    """The index of a cache folder.

    Attributes:
        identity: Of the features.
        target: What the user called the target; for people.
        rendering: What the documents' tokens depend on (chat template, lengths), to explain differences.
        content: Numbers of documents, tokens and shards, and the hash of the documents' addresses in order.
        num_bytes: Of all shards; 0 before the cache is finished.
        shards: File, documents, tokens, bytes and checksum of each shard; empty before the cache is finished.
    """

    identity: FeatureIdentity
    target: str
    rendering: dict[str, Any]
    content: dict[str, Any]
    num_bytes: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> CacheIndex:
        """Reads the index of a folder.

        Raises:
            FileNotFoundError: When there is none.
            ValueError: When it is damaged or of another version.
        """
        path = folder / INDEX
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no feature cache ({INDEX} is missing). Build one: treespark cache build --config "
                f"RECIPE --output {folder}"
            )
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            version = fields.pop("format")
            identity = FeatureIdentity.from_dict(fields.pop("identity"))
            index = cls(identity=identity, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}). Run treespark cache build again.") from error
        if version != FORMAT:
            raise ValueError(f"{path} has format {version}, this version reads {FORMAT}. Build the cache anew.")
        return index

    def write(self, folder: Path) -> None:
        """Puts the index in place at once; the caller holds the folder's lock."""
        fields = {"format": FORMAT} | asdict(self) | {"identity": self.identity.to_dict()}
        text = json.dumps(fields, indent=1, ensure_ascii=False) + "\n"
        write_whole(folder / INDEX, folder / f".{INDEX}", lambda place: place.write_text(text, encoding="utf-8"))

    @property
    def is_complete(self) -> bool:
        """Whether every shard is there and listed."""
        return bool(len(self.shards) == self.content["num_shards"])

    def check_complete(self, folder: Path) -> None:
        """Refuses a cache that is not finished.

        Raises:
            ValueError: With the number of shards that are missing.
        """
        if not self.is_complete:
            total = self.content["num_shards"]
            missing = sum(not (folder / Layout.file(shard)).is_file() for shard in range(total))
            raise ValueError(
                f"The feature cache {folder} is not finished: {missing} of {total} shards are missing. Run the same "
                "treespark cache build again; it continues (and lists the shards when all are there)."
            )

    def rendering_differences(self, here: dict[str, Any]) -> str:
        """Says what the rendering here differs in; empty if nothing that is known of both does."""
        both = self.rendering.keys() & here.keys()
        return describe_differences({key: (self.rendering[key], here[key]) for key in sorted(both)}, _RENDERING)

    def check_same(self, here: CacheIndex, folder: Path) -> None:
        """Refuses to continue a cache that was begun for something else.

        Raises:
            ValueError: Saying what differs.
        """
        parts = [
            self.identity.differences(here.identity),
            describe_differences({key: (self.content[key], here.content[key]) for key in _CONTENT}, _CONTENT),
        ]
        if self.content["documents_sha256"] != here.content["documents_sha256"]:  # else another template is no matter
            parts.append(self.rendering_differences(here.rendering))
        if difference := ", ".join(part for part in parts if part):
            raise ValueError(
                f"{folder} holds a feature cache that was built for something else: it differs in {difference}. Give "
                "another --output, or delete that folder."
            )


def list_shards(folder: Path, layout: Layout) -> list[dict[str, Any]] | None:
    """Returns the entries of all shards from their headers, or None while some are missing."""
    paths = [folder / layout.file(shard) for shard in range(layout.num_shards)]
    if not all(path.is_file() for path in paths):
        return None
    shards = map(Shard, paths)
    return [
        {
            "file": shard.path.name,
            "num_documents": len(shard.keys),
            "num_tokens": shard.starts[-1],
            "num_bytes": shard.num_bytes,
            "sha256": shard.sha256,
        }
        for shard in shards
    ]


def damaged_shards(folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yields the file of each shard of a finished cache, and what is wrong with it or None; reads everything.

    Raises:
        FileNotFoundError: When the folder holds no cache.
        ValueError: When the cache is not finished.
    """
    index = CacheIndex.read(folder)
    index.check_complete(folder)
    for entry in index.shards:
        yield entry["file"], _fault(folder / entry["file"], index.identity, entry)


def _fault(path: Path, identity: FeatureIdentity, entry: dict[str, Any]) -> str | None:
    try:
        shard = Shard(path)
    except FileNotFoundError:
        return f"{path} is missing."
    except ValueError as error:
        return str(error)
    if shard.sha256 != entry["sha256"] or shard.identity != identity:
        return f"{path} is not the shard that the index names."
    return None if shard.is_intact() else f"{path} is damaged: its content does not have its checksum."


@contextmanager
def locked(path: Path, refusal: str = "") -> Iterator[None]:
    """Holds a lock until the block ends, also by a kill; systems without such locks go without.

    Args:
        path: A folder, or a file that is made.
        refusal: Error when another process holds the lock; without it, the lock is waited for.

    Raises:
        ValueError: With the refusal.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with _opened(path) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except BlockingIOError:
            raise ValueError(refusal) from None
        except OSError:  # a file system without locks
            pass
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int | IO[bytes]]:
    if not path.is_dir():
        with path.open("ab") as stream:
            yield stream
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
