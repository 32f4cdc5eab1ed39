"""Private PyTorch APIs around what Dynamo keeps of a compiled function: code, guards, and how they come about.

As in ``torch_private`` each piece is small, says what it relies on, and knows nothing of the rest of the
library; tried on 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import decorators, exc
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState
from torch._guards import CompileContext
from torch.fx.experimental import _config as symbolic_shapes_config
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from .torch_private_settings import settings
from .torch_private_tracing import source_name

# Dynamo gives up beyond its limit of compiles for one function; who asks for none counts compiles.
_NO_LIMIT = 1 << 30

TRACING_FAILURES: tuple[type[Exception], ...] = (exc.TorchDynamoException, ConstraintViolationError)
"""What Dynamo raises where it cannot trace; never what traced code raises when it runs."""

Reader = Callable[[dict[str, Any]], list[Any]]
"""Lists what lies somewhere in a function's arguments, which it takes by name."""


class CompiledEntry:
    """One compile of a function: code made by Dynamo, and the guards under which it may run.

    Relies on the cache entries that Dynamo keeps with a code object. The entry itself is not held: its memory
    goes with Dynamo's list, while its code and its guards are objects of their own.

    Attributes:
        run: The code; for arguments that the guards hold for.
        tensor_sources: As the function of this name gave them inside the backend; empty until somebody sets it.
        number_sources: Likewise.
    """

    def __init__(self, entry: Any, original: types.FunctionType) -> None:
        self._guards = entry.guard_manager
        self._globals = original.__globals__
        self._readers: dict[tuple[str, ...], Reader] = {}
        self.tensor_sources: tuple[str, ...] = ()
        self.number_sources: tuple[str, ...] = ()
        self.run: Callable[..., Any] = types.FunctionType(
            entry.code, original.__globals__, original.__name__, None, original.__closure__
        )

    def fits(self, values: dict[str, Any]) -> bool:
        """Tells whether the guards hold, for arguments by parameter name and the modes that are on now."""
        # Without its entry it is no longer valid: something that a guard compares by identity died, or
        # Dynamo was reset.
        return self._guards.cache_entry is not None and bool(self._guards.check(values))

    def check_without(self, sources: Sequence[str]) -> Callable[[dict[str, Any]], bool]:
        """Returns a function that tells whether the guards hold that are not about some arguments.

        It takes all arguments by name. Guards of modes and other settings of the process are among those asked,
        and those that compare sizes, of whatever: PyTorch has them in one function. Relies on each guard's text
        naming what it looks at.

        Args:
            sources: Where what is not looked at lies, as Dynamo writes it: ``L['args'][0]``.
        """
        kept = self._guards.root.clone_manager(
            lambda manager: not any(source in manager.get_source() for source in sources)
        )
        check = kept.check
        return lambda values: self._guards.cache_entry is not None and check(values)

    def is_same(self, other: CompiledEntry) -> bool:
        """Tells whether both are of one compile: each look at what Dynamo keeps makes new objects of this class."""
        return self._guards is other._guards

    def tensor_reader(self, values: dict[str, Any]) -> Reader:
        """Returns what lists the tensors that the code reads of given arguments, as it would find them when asked.

        Args:
            values: Arguments by parameter name. What cannot be found in these is left out.
        """
        return self._reader(self.tensor_sources, torch.Tensor, values)

    def number_reader(self, values: dict[str, Any]) -> Reader:
        """Returns the same for integers that the code takes as inputs, which no guard compares."""
        return self._reader(self.number_sources, int, values)

    def _reader(self, sources: tuple[str, ...], kind: type, values: dict[str, Any]) -> Reader:
        found = tuple(one for one in sources if _is_at(one, kind, values, self._globals))
        if found not in self._readers:
            self._readers[found] = eval(f"lambda L: [{', '.join(found)}]", {"G": self._globals})
        return self._readers[found]

    def failed_guard(self, values: dict[str, Any]) -> str:
        """Returns the guards that fail first, as text; empty if none does."""
        info = self._guards.check_verbose(values)
        return "; ".join(str(part) for part in info.verbose_code_parts) if not info.result else ""


def _is_at(source: str, kind: type, values: dict[str, Any], names: dict[str, Any]) -> bool:
    try:
        return isinstance(eval(source, {"L": values, "G": names}), kind)
    except (AttributeError, LookupError, NameError, TypeError):
        return False


def compiled_entries(
    function: types.FunctionType, known: Sequence[CompiledEntry] = ()
) -> list[CompiledEntry]:
    """Returns what Dynamo made of a function so far, in the order that it tries them.

    Args:
        function: Which.
        known: From an earlier look; those that are still there are returned again.
    """
    found = [CompiledEntry(entry, function) for entry in _debug_get_cache_entry_list(function.__code__)]
    return [next((old for old in known if old.is_same(one)), one) for one in found]


def with_own_code(function: types.FunctionType, name: str) -> types.FunctionType:
    """Returns a function whose compiles are kept apart from those of the original, under a name of its own."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def forget_compiles(code: types.CodeType) -> None:
    """Drops what Dynamo made of a code object, which holds the model; Dynamo itself does so in a full reset only."""
    reset_code(code)


def base_of_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor that autograd's bookkeeping says this is a view of, or None."""
    return tensor._base


def mark_dynamic(tensor: torch.Tensor, dims: Sequence[int], *, must_be: bool) -> None:
    """Asks Dynamo not to bake dimensions in; with ``must_be`` it raises where it has to."""
    mark = decorators.mark_dynamic if must_be else decorators.maybe_mark_dynamic
    for dim in dims:
        mark(tensor, dim)


def without_dynamic_marks(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that ``mark_dynamic`` was not called on, over the same memory: guards look at the marks."""
    attributes = vars(tensor)
    return tensor.detach() if attributes and any(map(_is_mark, attributes)) else tensor


def _is_mark(attribute: str) -> bool:
    return attribute.startswith("_dynamo_")


@contextlib.contextmanager
def one_compile_for_all_sizes() -> Iterator[None]:
    """Lets one compile in the block serve as much as it can.

    Sizes 0 and 1 are as any other, and integers of modules become inputs once they vary. Floats stay constants:
    as inputs they would be host tensors, which a graph reads once. Dynamo's limit of compiles for one function,
    beyond which it would give up, is off: who uses this counts compiles. Guards look at the hooks of modules, which
    Dynamo leaves out by default: layers that are equal but for a hook would share one trace.
    """
    with (
        settings(symbolic_shapes_config, backed_size_oblivious=True),
        settings(
            dynamo_config,
            allow_unspec_int_on_nn_module=True,
            specialize_float=True,
            skip_nnmodule_hook_guards=False,
            recompile_limit=_NO_LIMIT,
            accumulated_recompile_limit=_NO_LIMIT,
        ),
    ):
        yield


def bake_numbers_of_modules(graph: torch.fx.Graph) -> None:
    """Makes Dynamo trace again with numbers that modules hold, such as the eps of a norm, as constants under guards.

    With ``dynamic=True`` each is a host tensor whose value the graph reads, and no CUDA graph can hold that read.
    Numbers that the caller passes stay as they are: they may differ at every call.

    Raises:
        TensorifyScalarRestartAnalysis: There are such numbers: Dynamo's own way to begin again, which it catches.
    """
    found = False
    for node in graph.nodes:
        argument = node.meta.get("grapharg") if node.op == "placeholder" else None
        if argument is None or not argument.pass_arg_as_tensor:
            continue
        kind = argument.source.guard_source
        kind = kind() if callable(kind) else kind
        number = node.meta["example_value"].item_memo
        is_read = bool(node.users) and all(user.target == "item" for user in node.users)
        if number is None or not is_read or not kind.is_unspecialized_nn_module():
            continue
        symbol = number.node._expr
        if symbol.is_symbol and not TensorifyState.should_specialize(symbol.name):
            TensorifyState.specialize(symbol.name)
            found = True
    if found:
        raise exc.TensorifyScalarRestartAnalysis


def is_last_compile() -> bool:
    """Tells, inside a backend, whether Dynamo will give up on this function instead of compiling it once more."""
    compile_id = CompileContext.current_compile_id()
    return compile_id is not None and (compile_id.frame_compile_id or 0) + 1 == dynamo_config.recompile_limit


def python_effects() -> list[str]:
    """Returns, inside a backend, what besides tensors the traced function changes of what was there before, as text.

    Relies on the table from which Dynamo writes the code that makes these changes after the graph has run.
    """
    effects = InstructionTranslator.current_tx().output.side_effects
    found = []
    for variable in effects.id_to_variable.values():
        if effects.is_modified(variable) and variable.source is not None:
            names = effects.store_attr_mutations.get(variable, {})
            source = source_name(variable.source)
            found += [f"{source}.{name}" for name in names] or [source]
    return found


def tensor_sources(graph: torch.fx.Graph) -> list[str]:
    """Returns, inside a backend, where the trace found the tensors that it reads, as expressions of Dynamo's.

    Each is Python over ``L``, the traced function's arguments by name, and ``G``, its globals; a few need names that
    only Dynamo has. Relies on what Dynamo keeps of each input until the compile is done.
    """
    return _sources(graph, torch.Tensor)


def number_sources(graph: torch.fx.Graph) -> list[str]:
    """Returns the same for integers that are inputs of the trace; sizes of tensors are among them."""
    return _sources(graph, (int, torch.SymInt))


def _sources(graph: torch.fx.Graph, kind: Any) -> list[str]:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    chosen = [node for node in inputs if isinstance(node.meta.get("example_value"), kind)]
    arguments = [node.meta.get("grapharg") for node in chosen]
    return [source_name(one.source) for one in arguments if one is not None and not one.pass_arg_as_tensor]


def failure_inside_backend(error: Exception) -> Exception:
    """Returns the error that a backend raised, where Dynamo wrapped it; else the error itself."""
    return error.inner_exception if isinstance(error, exc.BackendCompilerFailed) else error
