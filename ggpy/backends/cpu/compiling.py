"""Machine code of a function of `loops`. It imports numba, so it is imported only to compile."""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.core.ccallback import CFunc

OF_NUMBA = ("numba_", "NRT_")  # prefixes of the symbols of numba's runtime


def machine_code(dispatcher: Any, n_arguments: int) -> tuple[str, list[str], bytes]:
    """(symbol, numba's symbols that it refers to, object file) of an njit function of `n_arguments`
    int64; RuntimeError if the code contains addresses of this process.
    """
    signature = ((types.int64,) * n_arguments, types.void)
    made: Any = CFunc(dispatcher.py_func, signature, locals={}, options={"error_model": "numpy"})
    made.compile()
    library = made._library
    if library.has_dynamic_globals:
        raise RuntimeError(f"{dispatcher.py_func.__name__} refers to an object of this process")
    _, _, (code, _) = library.serialize_using_object_code()
    functions = library._final_module.functions
    declared = [f.name for f in functions if f.is_declaration and f.name.startswith(OF_NUMBA)]
    return made.native_name, declared, code
