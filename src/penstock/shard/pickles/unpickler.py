"""The virtual machine: it runs the opcodes of a pickle, and calls nothing but what it is given.

Python's pure-Python unpickler, without the opcodes that data do not need. A pickle of 87 bytes can build tuples of
tuples that take 2^40 steps to hash, or share one large text among a million copies. So what is built is charged to a
budget first, and keys are text, numbers or bytes, which are hashed in one step. Its size and its opcodes are bounded.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from penstock.core.limits import expansion_reason, max_item_bytes

__all__ = ["Allowed", "Budget", "PickleRefused", "Unpickler"]

_CHEAP_KEYS = {str, bytes, bool, float, type(None)}  # nobody can choose many of them with the same hash
_LARGE_INTEGER = 1 << 60  # larger ones can be chosen so that all have the same hash
_MAX_INTEGER_BYTES = 4096
_MAX_BYTES, _MAX_OPCODES = 1 << 30, 10_000_000  # a few seconds
_CALL_BYTES, _SET_BYTES, _POINTER_BYTES = 200, 216, 8
_MAX_LETTERS = 80


class PickleRefused(ValueError):  # noqa: N818  # a reason, which the reader puts into a DamageError
    """A pickle that holds anything but data, or data that take too much memory."""


class Budget:
    """The bytes that may be built while a payload is read, whether or not they are kept."""

    def __init__(self, stored_bytes: int) -> None:
        self._stored_bytes = stored_bytes
        self._left = max_item_bytes(stored_bytes)

    def charge(self, n_bytes: int) -> None:
        """Count `n_bytes` that are about to be built; raise PickleRefused if they are too many."""
        self._left -= n_bytes
        if self._left < 0:
            raise PickleRefused(expansion_reason("it", None, self._stored_bytes))


class Allowed:
    """A function that a pickle may call, but neither change nor return. It is given the unpickler and the arguments."""

    __slots__ = ("_call",)
    __hash__ = None  # type: ignore[assignment]  # no key
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, unpickler: "Unpickler", *arguments: Any) -> Any:
        """Call the function."""
        return self._call(unpickler, *arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise PickleRefused(f"it modifies {name!r} of an object that is not data")


class Unpickler(pickle._Unpickler):
    """Runs one pickle after the other of a payload.

    Parameters
    ----------
    names
        What a pickle may name: module and name to an `Allowed`, or to a value.
    load_persistent
        Returns what a persistent id stands for; None: refuse them.
    """

    # Attributes of the base class that typeshed leaves out.
    append: Callable[[Any], None]
    stack: list[Any]
    metastack: list[Any]
    pop_mark: Callable[[], list[Any]]
    encoding, errors = "ASCII", "strict"  # of STRING, in which Python 2 wrote texts

    def __init__(
        self,
        payload: bytes,
        budget: Budget,
        names: dict[tuple[str, str], Any],
        load_persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        if len(payload) > _MAX_BYTES:
            raise PickleRefused(f"a pickle of {len(payload):,} bytes; at most {_MAX_BYTES:,} are allowed")
        self.payload, self.position, self.budget = payload, 0, budget
        self._names, self._load_persistent = names, load_persistent
        self._hashes: dict[int, tuple[Any, dict[int, int]]] = {}  # by id of a container: how often each hash occurs

    def load(self) -> Any:
        """Return the value of the pickle that begins at `position`, and set `position` to its end."""
        self.stack, self.metastack, self.proto = [], [], 0
        self.memo: dict[int, Any] = {}
        self.append = self.stack.append
        payload, dispatch = self.payload, self.dispatch
        try:
            for _ in range(_MAX_OPCODES):
                code = payload[self.position]
                self.position += 1
                dispatch[code](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]  # typeshed leaves it out
            return stop.value
        raise PickleRefused(f"a pickle of more than {_MAX_OPCODES:,} opcodes; store numbers as an array")

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; raise EOFError if there are fewer."""
        begin = self.position
        self.position = end = begin + size
        if end > len(self.payload):
            raise EOFError("it ends too early")
        return self.payload[begin:end]

    def readline(self) -> bytes:
        """Return the next line with its end."""
        end = self.payload.find(b"\n", self.position) + 1
        if not end:
            raise EOFError("it ends too early")
        return self.read(end - self.position)

    # -- names ---------------------------------------------------------------------------------------------------------

    def persistent_load(self, pid: Any) -> Any:
        """Return what a persistent id stands for."""
        if self._load_persistent is None:
            raise PickleRefused("it refers to an object outside the pickle")
        return self._load_persistent(pid)

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for; raise PickleRefused if it is not allowed."""
        home = module[:_MAX_LETTERS].replace("numpy._core", "numpy.core").replace("__builtin__", "builtins")
        if (home, name) not in self._names:
            raise PickleRefused(
                f"it uses {module[:_MAX_LETTERS]}.{name[:_MAX_LETTERS]}, but a pickle must hold only arrays, tensors "
                "and plain containers; allow_pickle=True would load it, and run any code in the file"
            )
        return self._names[home, name]

    # -- what is charged -----------------------------------------------------------------------------------------------

    def check_key(self, container: Any, key: Any) -> None:
        """Charge the steps that it takes to hash a key and to compare it with others of the container."""
        kind = type(key)
        if kind in _CHEAP_KEYS or (kind is int and -_LARGE_INTEGER < key < _LARGE_INTEGER):
            return
        if kind not in (int, complex) and not isinstance(key, np.generic):  # structured scalars are never made
            raise PickleRefused(f"a key of type {kind.__name__}; keys must be text, numbers or bytes")
        self.budget.charge(_POINTER_BYTES)
        counts = self._hashes.setdefault(id(container), (container, {}))[1]
        found = hash(key)
        counts[found] = n_equal = counts.get(found, 0) + 1
        self.budget.charge(_POINTER_BYTES * n_equal)

    def check_keys(self, container: Any, keys: Any) -> None:
        """Charge all keys of a container that is about to be made or extended."""
        for key in keys:
            self.check_key(container, key)

    # -- opcodes -------------------------------------------------------------------------------------------------------

    def _load_frame(self) -> None:
        """Check that the whole frame is present; its content is then read as if unframed."""
        size = int.from_bytes(self.read(8), "little")
        if size > len(self.payload) - self.position:
            raise EOFError("it ends too early")

    def _load_bytearray(self) -> None:
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    def _load_integer(self) -> None:
        size = int.from_bytes(self.read(4), "little")
        if size > _MAX_INTEGER_BYTES:
            raise PickleRefused(f"an integer of {size} bytes")
        self.append(int.from_bytes(self.read(size), "little", signed=True))

    def _load_text_integer(self) -> None:
        """INT and LONG of protocol 0; INT 00 and 01 are False and True."""
        text = self.readline()[:-1]
        if len(text) > _MAX_INTEGER_BYTES:
            raise PickleRefused(f"an integer of {len(text)} digits")
        known = {b"00": False, b"01": True}.get(text)
        self.append(int(text.rstrip(b"L"), 0) if known is None else known)

    def _load_empty_set(self) -> None:
        self.budget.charge(_SET_BYTES)
        self.append(set())

    def _load_frozenset(self) -> None:
        items = self.pop_mark()
        self.budget.charge(_SET_BYTES)
        self.check_keys(items, items)
        self.append(frozenset(items))

    def _load_additems(self) -> None:
        items = self.pop_mark()
        found = self._top(set)
        self.check_keys(found, items)
        found.update(items)

    def _load_dict(self) -> None:
        items = self.pop_mark()
        found: dict[Any, Any] = {}
        self.check_keys(found, items[::2])
        found.update(zip(items[::2], items[1::2], strict=True))
        self.append(found)

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        found = self._top(dict, OrderedDict)
        self.check_key(found, key)
        found[key] = value

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        found = self._top(dict, OrderedDict)
        self.check_keys(found, items[::2])
        found.update(zip(items[::2], items[1::2], strict=True))

    def _load_append(self) -> None:
        value = self.stack.pop()
        self._top(list).append(value)

    def _load_appends(self) -> None:
        items = self.pop_mark()
        self._top(list).extend(items)

    def _load_reduce(self) -> None:
        arguments, call = self.stack.pop(), self.stack[-1]
        if type(call) is not Allowed or type(arguments) is not tuple:
            raise PickleRefused("it calls something that is no function")
        self.budget.charge(_CALL_BYTES + _POINTER_BYTES * len(arguments))
        self.stack[-1] = call(self, *arguments)

    def _load_build(self) -> None:
        state, found = self.stack.pop(), self.stack[-1]
        if hasattr(type(found), "set_state"):  # an array or a dtype, which is made when all is read
            found.set_state(state)
        elif type(found) is OrderedDict and type(state) is dict and state.keys() <= {"_metadata"}:
            vars(found).update(state)  # of a state_dict(); another name could hide a method
        else:
            raise PickleRefused("it modifies an object that is not data")

    def _top(self, *kinds: type) -> Any:
        if type(self.stack[-1]) not in kinds:
            raise PickleRefused(f"it modifies a {type(self.stack[-1]).__name__} as if it were a {kinds[0].__name__}")
        return self.stack[-1]

    # Opcode to method: without registered extensions, instances of classes and out-of-band buffers.
    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code])
        not in (
            *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX),
            *(pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
        )
    } | {
        pickle.FRAME[0]: _load_frame,
        pickle.BYTEARRAY8[0]: _load_bytearray,
        pickle.LONG4[0]: _load_integer,
        pickle.INT[0]: _load_text_integer,
        pickle.LONG[0]: _load_text_integer,
        pickle.EMPTY_SET[0]: _load_empty_set,
        pickle.FROZENSET[0]: _load_frozenset,
        pickle.ADDITEMS[0]: _load_additems,
        pickle.DICT[0]: _load_dict,
        pickle.SETITEM[0]: _load_setitem,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.APPEND[0]: _load_append,
        pickle.APPENDS[0]: _load_appends,
        pickle.REDUCE[0]: _load_reduce,
        pickle.BUILD[0]: _load_build,
    }
