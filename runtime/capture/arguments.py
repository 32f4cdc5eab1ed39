"""How a call's arguments are named: one canonical form, however a parameter was passed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import tree
from ..errors import InputMismatchError


class ArgumentBinder:
    """Maps a call's arguments to a canonical nested value with readable paths.

    Args:
        fn: The function; one without a signature (some builtins) has its arguments taken as they come.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        target = fn.forward if isinstance(fn, torch.nn.Module) else fn
        try:
            self._signature: inspect.Signature | None = inspect.signature(target)
        except (TypeError, ValueError):
            self._signature = None

    def canonical(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments as the function will get them.

        However a parameter was passed, it stands in the same place: positional where it can be.

        Raises:
            InputMismatchError: The call does not fit the signature.
        """
        if self._signature is None:
            return args, dict(kwargs)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputMismatchError(
                f"The call does not fit the captured function: {error}. Its signature is {self._signature}."
            ) from error
        return bound.args, bound.kwargs

    def leaf_paths(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        """Names the leaves of canonical arguments in flattening order."""
        paths: list[str] = []
        for name, spec in self.named(*tree.flatten((args, dict(kwargs)))[1].children).items():
            paths += tree.paths(spec, name)
        return paths

    def named(self, args: tree.Spec, kwargs: tree.Spec) -> dict[str, tree.Spec]:
        """Names the structures of canonical positional and keyword arguments, in order."""
        names = [f"args[{index}]" for index in range(len(args.children))]
        if self._signature is not None:
            for index, parameter in enumerate(self._signature.parameters.values()):
                if parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY) or index >= len(
                    names
                ):
                    break
                names[index] = parameter.name
        return dict(zip([*names, *kwargs.keys], [*args.children, *kwargs.children], strict=True))
