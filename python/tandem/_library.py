"""The shared library and the structures of include/tandem.h, in their order."""
import ctypes
import os
import pathlib
from ctypes import (POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64,
                    c_void_p)

STOP, LENGTH, CANCELLED = 1, 2, 3  # tandem_finish
INVALID = 2  # tandem_status

ON_PROGRESS = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64)
ON_WARNING = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)


class TandemError(RuntimeError):
    """A failure at run time, such as a lost GPU. What the caller can correct is a ValueError."""


class Options(Structure):
    _fields_ = [("size", c_size_t), ("device", c_char_p), ("threads", c_int), ("context", c_int64),
                ("max_running", c_int), ("step_tokens", c_int), ("kv_tokens", c_int64), ("kv_fraction", c_double),
                ("experts", c_char_p), ("placement", c_char_p), ("cache", c_char_p), ("no_prefix_cache", c_int),
                ("draft_tokens", c_int), ("no_async_output", c_int), ("on_progress", ON_PROGRESS),
                ("on_warning", ON_WARNING), ("user", c_void_p), ("draft", c_char_p)]


class Bias(Structure):
    _fields_ = [("token", c_int32), ("bias", c_float)]


class Request(Structure):
    _fields_ = [("size", c_size_t), ("text", c_char_p), ("messages", c_char_p), ("tokens", POINTER(c_int32)),
                ("n_tokens", c_size_t), ("max_tokens", c_int), ("min_tokens", c_int), ("temperature", c_float),
                ("top_p", c_float), ("top_k", c_int), ("min_p", c_float), ("repetition_penalty", c_float),
                ("presence_penalty", c_float), ("frequency_penalty", c_float), ("seed", c_uint64),
                ("biases", POINTER(Bias)), ("n_biases", c_size_t), ("stops", POINTER(c_char_p)),
                ("n_stops", c_size_t), ("stop_tokens", POINTER(c_int32)), ("n_stop_tokens", c_size_t),
                ("ignore_eos", c_int), ("keep_special", c_int), ("include_stop", c_int), ("want_logprobs", c_int),
                ("n_top_logprobs", c_int)]


class TokenLogprob(Structure):
    _fields_ = [("token", c_int32), ("logprob", c_float)]


class Token(Structure):
    _fields_ = [("index", c_size_t), ("text", c_void_p), ("text_bytes", c_size_t), ("token", c_int32),
                ("logprob", c_float), ("top", POINTER(TokenLogprob)), ("n_top", c_size_t),
                ("prompt_tokens", c_int64), ("cached_tokens", c_int64), ("finish", c_int)]


ON_TOKEN = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(Token))
CANCELLED_HOOK = ctypes.CFUNCTYPE(c_int, c_void_p)


class Hooks(Structure):
    _fields_ = [("on_token", ON_TOKEN), ("cancelled", CANCELLED_HOOK), ("user", c_void_p)]


def _load():
    """libtandem.so of this package, or the one that TANDEM_LIBRARY names."""
    path = os.environ.get("TANDEM_LIBRARY") or pathlib.Path(__file__).with_name("libtandem.so")
    library = ctypes.CDLL(str(path))
    for name, result, arguments in (
            ("tandem_open", c_int, [c_char_p, POINTER(Options), POINTER(c_void_p)]),
            ("tandem_close", None, [c_void_p]),
            ("tandem_generate", c_int, [c_void_p, POINTER(Request), c_size_t, POINTER(Hooks)]),
            ("tandem_count_tokens", c_int64, [c_void_p, POINTER(Request), POINTER(c_int32), c_size_t]),
            ("tandem_describe", c_char_p, [c_void_p]),
            ("tandem_error", c_char_p, []),
            ("tandem_version", c_char_p, [])):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


library = _load()


def version():
    return library.tandem_version().decode()


def last_error():
    """The message of the call that failed last on this thread."""
    return library.tandem_error().decode(errors="replace")


def require_ok(status):
    """Raises what a call that returned this tandem_status failed with."""
    if status:
        raise (ValueError if status == INVALID else TandemError)(last_error())


def c_array(kind, items):
    """A C array of `items`, and their number."""
    items = list(items)
    return (kind * len(items))(*items), len(items)
