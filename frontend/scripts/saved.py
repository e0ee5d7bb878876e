"""What a script saves and loads: kept in memory, since there are no values to write, and a mark in its file.

Of a checkpoint that all ranks write (`torch.distributed.checkpoint`) nothing is kept: who loads one that the run
saved gets the tensors that are to take it. Of a file of safetensors shapes and types are written and read.
"""

from __future__ import annotations

import bz2
import copy
import gzip
import importlib
import importlib.util
import json
import lzma
import os
import shutil
import sys
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from echograph.errors import CaptureError
from echograph.frontend.pytorch.known_values import apart, given, know
from echograph.frontend.scripts.adapter import once_imported, patched, replaced
from echograph.frontend.scripts.opened import listening
from echograph.frontend.scripts.places import is_gpu, mark

MOST_READ_BYTES = 1 << 26
"""Of a file whose values are read: constants, indices, tokens; what is larger is weights, mostly."""


def _with_what_is_small(original: Callable[..., Any], f: Any, args: Any, kwargs: Any) -> Any:
    """What `torch.load` makes of a file of the user's, where it is put; small tensors in it have their values."""
    begin = f.tell() if hasattr(f, "seek") and hasattr(f, "tell") else None
    made = original(f, *args, **kwargs)
    there = args[0] if args else kwargs.get("map_location")
    loaded = [part for part in tree_leaves(made) if isinstance(part, FakeTensor)]
    if isinstance(there, str | torch.device) and is_gpu(there):
        for fake in loaded:
            mark(fake)
    if loaded and _is_small_file(f, begin):
        rest = {name: given for name, given in kwargs.items() if name != "map_location"}
        with apart():
            again = original(f, "cpu", *args[1:], **rest)
        read = [part for part in tree_leaves(again) if isinstance(part, Tensor)]
        for fake, part in zip(loaded, read, strict=False):
            if type(part) is Tensor and fake.shape == part.shape:
                know(fake, part)
    return made


def _is_small_file(f: Any, begin: int | None) -> bool:
    """Whether the values of a file may be read once more; a stream is then where it began."""
    if begin is None:
        return isinstance(f, str | os.PathLike) and Path(f).is_file() and Path(f).stat().st_size <= MOST_READ_BYTES
    size = f.tell() - begin  # as far as it was read
    if size <= MOST_READ_BYTES:
        f.seek(begin)
    return bool(size <= MOST_READ_BYTES)


def _small_in_bytes(original: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """What `pickle` reads of a tensor's memory, which is there if it is small."""

    def load(given: bytes) -> Any:
        with apart() if len(given) <= MOST_READ_BYTES else nullcontext():
            return original(given)

    return load


def _with_its_values(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A tensor that `pickle` makes of memory that is there has its values."""

    def rebuild(storage: Any, *args: Any) -> Tensor:
        mode = active_fake_mode()
        if mode is None or storage._untyped_storage.device.type == "meta":
            return original(storage, *args)
        with apart():
            read = original(storage, *args)
        made: Tensor = given(mode.from_tensor, read)
        return made

    return rebuild


class Saved:
    """What was saved in a run, by file.

    Args:
        note: is told that nothing was written.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._kept: dict[bytes, Any] = {}
        self._checkpoints: set[str] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the context, scripts save here and load from here; files that would have held it are as they were."""
        with ExitStack() as stack:
            files = Overwritten(Path(tempfile.mkdtemp(prefix="echograph-saved-", dir=_FOLDER.get())))
            stack.callback(lambda: self._note_pickles(put_back(files.folder)))
            stack.enter_context(patched(torch, "save", self._saving))
            stack.enter_context(patched(torch, "load", self._loading))
            stack.enter_context(patched(FakeTensor, "__reduce_ex__", partial(_by_number, files.folder)))
            stack.callback(_PICKLED.clear)
            stack.enter_context(patched(torch.storage, "_load_from_bytes", _small_in_bytes))
            stack.enter_context(patched(torch._utils, "_rebuild_tensor_v2", _with_its_values))
            if importlib.util.find_spec("safetensors") is not None:
                stack.enter_context(headers_alone(files))
            stack.enter_context(once_imported(f"{_CHECKPOINT}.state_dict_saver", self._of_all_ranks))
            stack.enter_context(listening(files.opening, files.moving))
            yield

    def _note_pickles(self, names: list[str]) -> None:
        if names:
            self._note(f"{', '.join(names)}: tensors in it have no values: it is gone, or as it was before")

    def _saving(self, original: Callable[..., Any]) -> Callable[..., None]:
        """`torch.save` that keeps what it is given, and writes what stands for it, wherever that goes."""

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(obj, _STORAGES) and obj.device.type == "cpu":
                with apart():  # part of what is pickled for another process, which has values
                    original(obj, f, *args, **kwargs)
                return
            self._note("torch.save writes no values, of which there are none")
            mark = _MARK + uuid.uuid4().hex.encode()
            self._kept[mark] = obj
            if isinstance(f, str | os.PathLike):
                Path(f).write_bytes(mark)
            elif hasattr(f, "write"):
                f.write(mark)

        return save

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.load` that gives a copy of what the run saved there, and reads all other files."""

        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            mark = _mark(f)
            if mark is None:
                return _with_what_is_small(original, f, args, kwargs)
            if mark not in self._kept:
                where = f if isinstance(f, str | os.PathLike) else getattr(f, "name", f)
                raise CaptureError(f"{where}: a capture that has ended wrote it, without values: remove it")
            try:
                return copy.deepcopy(self._kept[mark])
            except (TypeError, RuntimeError, NotImplementedError):  # a process group, a lock
                return self._kept[mark]

        return load

    @contextmanager
    def _of_all_ranks(self) -> Iterator[None]:
        """In the context, ranks write no checkpoint together, at once or beside the training."""
        names = ("state_dict_saver", "state_dict_loader", "staging", "_async_thread_executor")
        saver, loader, staging, beside = (importlib.import_module(f"{_CHECKPOINT}.{name}") for name in names)
        in_place = beside._ThreadBasedAsyncCheckpointExecutor
        with (
            patched(saver, "_save_state_dict", self._saving_all),
            patched(loader, "_load_state_dict", self._loading_all),
            patched(staging.DefaultStager, "stage", _as_it_is),
            patched(staging.BlockingAsyncStager, "stage", _as_it_is),
            replaced(saver, "_ProcessBasedAsyncCheckpointExecutor", in_place),
        ):
            yield

    def _saving_all(self, original: Callable[..., Any]) -> Callable[..., Any]:
        del original

        def save(state_dict: Any, storage_writer: Any, *_: Any, **__: Any) -> Any:
            self._note(
                "torch.distributed.checkpoint writes nothing: there are no values to save, and what ranks tell "
                "each other to do so is left out"
            )
            self._checkpoints.add(_place(storage_writer))
            metadata: Any = importlib.import_module(f"{_CHECKPOINT}.metadata")
            return metadata.Metadata(state_dict_metadata=dict.fromkeys(state_dict))

        return save

    def _loading_all(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(state_dict: Any, storage_reader: Any, *args: Any, **kwargs: Any) -> Any:
            if _place(storage_reader) not in self._checkpoints:
                return original(state_dict, storage_reader, *args, **kwargs)
            return None  # the tensors that take what was saved are there

        return load


_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_CHECKPOINT = "torch.distributed.checkpoint"


def _place(storage: Any) -> str:
    """Where a writer or a reader of checkpoints has them."""
    return str(getattr(storage, "path", "") or getattr(storage, "checkpoint_id", "") or type(storage).__name__)


def _as_it_is(original: Callable[..., Any]) -> Callable[..., Any]:
    """Brings tensors to the host before they are written, which nobody does."""
    del original
    return lambda stager, state_dict, **_: state_dict


_PICKLED: dict[int, Tensor] = {}
"""Tensors of a run that were pickled: what is written of each is its number."""


def _by_number(folder: Path, original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(tensor: Tensor, protocol: Any) -> Any:
        if sys._getframe(1).f_code is copy.copy.__code__:  # which goes by what would be pickled
            return original(tensor, protocol)
        if not _PICKLED:
            (folder / _PICKLES).touch()
        _PICKLED[id(tensor)] = tensor
        return _unpickled, (id(tensor), _MARK)

    return reduce


def _unpickled(number: int, mark: bytes) -> Tensor:
    del mark  # by which its file is known
    if number not in _PICKLED:
        raise CaptureError("a tensor was pickled by a capture that has ended, without values: remove its file")
    return copy.deepcopy(_PICKLED[number])


_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)
_PATH, _COPY, _EMPTIED, _PICKLES = "path", "copy", "emptied", "pickles"


def keep_in(folder: Path) -> None:
    """From here on, what scripts overwrite is kept in a folder, by which others can `put_back`, too."""
    _FOLDER.set(folder)


def kept_in() -> Path | None:
    """The folder that others remove, whatever a script does to its process; None: there is none."""
    return _FOLDER.get()


class Overwritten:
    """Files that a script writes anew, as they were before; on the disk, for scripts that end their process.

    Args:
        folder: where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, Path] = {}

    def opening(self, path: str, mode: str) -> None:
        """Keeps a file before it is written anew: what is saved there has no values."""
        if set(mode) & {"w", "x"}:
            self._keep(Path(path).absolute())

    def _keep(self, path: Path) -> None:
        if str(path) in self._known or self.folder in path.parents or (path.exists() and not path.is_file()):
            return
        # Threads and forked processes keep files in the same folder.
        self._known[str(path)] = kept = Path(tempfile.mkdtemp(dir=self.folder))
        (kept / _PATH).write_text(str(path))
        if path.exists():
            # What cannot be read is not kept; the script may write it nevertheless.
            with suppress(OSError):
                shutil.copyfile(path, kept / _COPY)

    def moving(self, path: str, to: str) -> None:
        """Keeps what lies where a file goes that was written, or a folder with such files."""
        here, there = Path(path).absolute(), Path(to).absolute()
        for known in [each for each in map(Path, self._known) if here in (each, *each.parents)]:
            emptied = (self._known[str(known)] / _EMPTIED).exists()
            (self.emptied if emptied else self._keep)(there / known.relative_to(here))

    def emptied(self, path: Path) -> None:
        """A file is about to be written without its values, whatever was there."""
        self._keep(path.absolute())
        (self._known[str(path.absolute())] / _EMPTIED).touch()


def put_back(folder: Path) -> list[str]:
    """Files that hold what stands for a saved object, or for a pickled tensor, are gone, or as they were before.

    Args:
        folder: of an `Overwritten`; it is gone after that.

    Returns:
        Names of files of pickled tensors.
    """
    pickles = (folder / _PICKLES).exists()
    pickled = []
    for kept in (each for each in folder.iterdir() if each.is_dir()):
        path = Path((kept / _PATH).read_text())
        if not path.is_file():
            continue
        saved = (kept / _EMPTIED).exists() or _mark(path) is not None
        if not saved and pickles and _holds_a_mark(path):
            pickled.append(path.name)
            saved = True
        if saved:
            if (kept / _COPY).exists():
                shutil.copyfile(kept / _COPY, path)
            else:
                path.unlink()
    shutil.rmtree(folder)
    return pickled


_MARK = b"echograph keeps what was saved: "
_LENGTH = len(_MARK) + len(uuid.uuid4().hex)


def _holds_a_mark(path: Path) -> bool:
    """Whether a file, compressed or not, has anything in it that stands for a tensor without values."""
    for opened in (Path.open, gzip.open, bz2.open, lzma.open):
        with suppress(OSError, EOFError, lzma.LZMAError), opened(path, "rb") as file:  # of its own form alone
            held = b""
            while part := file.read(1 << 24):
                held = held[-len(_MARK) :] + part
                if _MARK in held:
                    return True
    with suppress(zlib.error):  # as joblib does
        return path.stat().st_size <= MOST_READ_BYTES and _MARK in zlib.decompress(path.read_bytes())
    return False


def _mark(f: Any) -> bytes | None:
    """What stands for a saved object in a file or a stream; None where something else is in it."""
    if isinstance(f, str | os.PathLike):
        if not Path(f).is_file():
            return None
        with Path(f).open("rb") as file:
            head: bytes = file.read(_LENGTH)
    else:
        if not (hasattr(f, "read") and hasattr(f, "seek")):
            return None
        at = f.tell()
        head = f.read(_LENGTH)
        f.seek(at)
    return head if head.startswith(_MARK) else None


# Names of types in the header of a file of safetensors, and PyTorch's.
_SAFE = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_MOST_HEADER = 100 * 2**20  # as safetensors has it


def weights(original: Callable[..., Any]) -> Callable[..., dict[str, Tensor]]:
    """`safetensors.torch.load_file` that reads the header alone: names, shapes and types."""
    del original

    def load_file(filename: str | os.PathLike[str], device: Any = "cpu") -> dict[str, Tensor]:
        opened = Opened(filename, device=device)
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 it is no mapping

    return load_file


def _header_of(tensors: dict[str, Tensor], metadata: Any) -> bytes:
    """What a file of safetensors begins with, which is all there is of one here."""
    names, entries, end = {dtype: name for name, dtype in _SAFE.items()}, dict[str, Any](), 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    header = json.dumps(({"__metadata__": metadata} if metadata else {}) | entries).encode()
    return len(header).to_bytes(8, "little") + header


@contextmanager
def headers_alone(files: Overwritten) -> Iterator[None]:
    """In the context, of files of safetensors the headers are read; after it all have the old readers again.

    A script may read the header of one that it wrote, which is gone after the context, or as it was before.
    """
    package: Any = importlib.import_module("safetensors")
    original = package.safe_open

    def writing(save: Callable[..., Any]) -> Callable[..., None]:
        del save

        def save_file(tensors: dict[str, Tensor], filename: Any, metadata: Any = None) -> None:
            files.emptied(Path(filename))
            Path(filename).write_bytes(_header_of(tensors, metadata))

        return save_file

    of_tensors = importlib.import_module("safetensors.torch")
    with patched(of_tensors, "load_file", weights), patched(of_tensors, "save_file", writing):
        _hand_out(original, Opened)
        try:
            yield
        finally:
            _hand_out(Opened, original)


def _hand_out(old: Any, new: Any) -> None:
    """Gives all modules that have one `safe_open` another."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("safe_open") is old:
            module.safe_open = new  # type: ignore[attr-defined]


class Opened:
    """`safetensors.safe_open` of which the header is read alone: tensors have shapes and types.

    Args:
        filename: the file.
        framework: as there; all are PyTorch's.
        device: of the tensors.

    Raises:
        CaptureError: it is no file of safetensors.
    """

    def __init__(
        self, filename: str | os.PathLike[str], framework: str = "pt", device: Any = "cpu", **_: Any
    ) -> None:
        del framework
        with Path(filename).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MOST_HEADER:
                raise CaptureError(f"{filename}: no file of safetensors: its header says {length:,} bytes")
            self._header: dict[str, Any] = json.loads(file.read(length))
        self._metadata, self._device = self._header.pop("__metadata__", None), device

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._header)

    offset_keys = keys

    def metadata(self) -> dict[str, str] | None:
        """What the file says of itself."""
        found: dict[str, str] | None = self._metadata
        return found

    def get_tensor(self, name: str) -> Tensor:
        """One of its shape and type."""
        held = self._header[name]
        return torch.empty(held["shape"], dtype=_SAFE[held["dtype"]], device=self._device)

    def get_tensors(self) -> dict[str, Tensor]:
        """All, by name."""
        return {name: self.get_tensor(name) for name in self.keys()}

    def get_slice(self, name: str) -> _Slice:
        """What may be asked of a tensor before it is read."""
        return _Slice(self, name)


class _Slice:
    def __init__(self, file: Opened, name: str) -> None:
        self._file, self._name = file, name

    def get_shape(self) -> list[int]:
        return list(self._file._header[self._name]["shape"])

    def get_dtype(self) -> str:
        return str(self._file._header[self._name]["dtype"])

    def __getitem__(self, index: Any) -> Tensor:
        return self._file.get_tensor(self._name)[index]
