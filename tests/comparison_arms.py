"""Strategies with faults on purpose, a model with a mark, and a small check of JSON Schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_piecewise import eager_on_graph
from sgl_piecewise.comparison.arms import Arm, ArmSetup
from sgl_piecewise.comparison.inputs import num_tokens_of, padded_to
from sgl_piecewise.comparison.records import GraphMemory
from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.records import BuildRecord, SizeBuild


@eager_on_graph
def halve(x: torch.Tensor) -> torch.Tensor:
    """The break of `SmallModel`."""
    return x / 2


class SmallModel(torch.nn.Module):
    """Token ids to logits, with one break; row ``i`` sees only row ``i``."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(50, 8, generator=generator), requires_grad=False)
        self.out = torch.nn.Parameter(torch.randn(8, 50, generator=generator), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return halve(self.table[input_ids].sin()) @ self.out


def small_inputs(*token_counts: int, num_inputs: int = 2) -> list[tuple[torch.Tensor]]:
    """Seeded token ids for `SmallModel`."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(50, (count,), generator=generator),)
        for count in token_counts
        for _ in range(num_inputs)
    ]


class FaultyArm(Arm):
    """Runs the padded model without any graph, then does what a fault would.

    Args:
        setup: As for every arm.
        fault: Takes the arm, the number of tokens and the right output; returns what is given out.
        sizes_without_graph: Capture sizes that ran out of memory while building.
    """

    def __init__(
        self,
        setup: ArmSetup,
        fault: Callable[[FaultyArm, int, torch.Tensor], torch.Tensor] | None = None,
        sizes_without_graph: tuple[int, ...] = (),
    ) -> None:
        self.setup = setup
        self.fault = fault
        self.sizes_without_graph = sizes_without_graph
        self.counted: dict[str, int] = {}
        self.last: torch.Tensor | None = None
        self.is_closed = False

    def build(self, on_progress: ProgressCallback) -> BuildRecord:
        on_progress("capture", 1, 1)
        sizes = tuple(
            SizeBuild(
                size=size,
                warm_up_s=0.1,
                capture_s=0.2,
                num_graph_segments=3,
                num_breaks=2,
                reserved_bytes=1_000_000,
                driver_bytes=150_000,
                error="out of memory: tried to allocate 1 GiB" if size in self.sizes_without_graph else None,
            )
            for size in reversed(self.setup.capture_sizes)
        )
        return BuildRecord(
            strategy="faulty",
            device="test",
            is_emulated=True,
            segments_launched=False,
            total_s=1.0,
            phases_s={"warm_up": 0.4, "capture": 0.5},
            sizes=sizes,
        )

    def run(self, *arguments: Any) -> torch.Tensor:
        count = num_tokens_of(arguments)
        size = self.padded_size(count)
        assert size is not None
        output = self.setup.model(*padded_to(arguments, size))[:count]
        return output if self.fault is None else self.fault(self, count, output)

    def padded_size(self, num_tokens: int) -> int | None:
        size = next((size for size in self.setup.capture_sizes if size >= num_tokens), None)
        return None if size in self.sizes_without_graph else size

    def fallbacks(self) -> dict[str, int]:
        return dict(self.counted)

    def memory(self) -> GraphMemory:
        return GraphMemory(allocator_bytes=1_200_000, largest_alone_bytes=1_000_000, driver_bytes=300_000)

    @property
    def break_names(self) -> tuple[str, ...]:
        return ("halve", "halve")

    def close(self) -> None:
        self.is_closed = True


def check_schema(value: Any, schema: dict[str, Any], definitions: dict[str, Any], path: str = "$") -> None:
    """Asserts that ``value`` fits ``schema``: the part of JSON Schema that ours uses."""
    if "$ref" in schema:
        check_schema(value, definitions[schema["$ref"].removeprefix("#/$defs/")], definitions, path)
        return
    if "anyOf" in schema:
        errors = []
        for option in schema["anyOf"]:
            try:
                check_schema(value, option, definitions, path)
                return
            except AssertionError as error:
                errors.append(str(error))
        raise AssertionError(f"{path}: fits none of {errors}")
    if "const" in schema:
        assert value == schema["const"], path
    if "enum" in schema:
        assert value in schema["enum"], path
    kinds = {
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
        "object": dict,
        "array": list,
    }
    if "type" in schema:
        assert isinstance(value, kinds[schema["type"]]), f"{path}: {value!r} is no {schema['type']}"
        assert schema["type"] == "boolean" or not isinstance(value, bool), path
    for name in schema.get("required", ()):
        assert name in value, f"{path}: {name} is missing"
    for name, item in value.items() if isinstance(value, dict) else ():
        item_schema = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
        check_schema(item, item_schema, definitions, f"{path}.{name}")
    if "items" in schema:
        for index, item in enumerate(value):
            check_schema(item, schema["items"], definitions, f"{path}[{index}]")
