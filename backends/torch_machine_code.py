"""Loops that no library has, as machine code: LLVM makes it while the program runs.

A piece of code gets one array of 64-bit numbers, addresses among them. Vectors are as wide as the
CPU's registers, in lanes of 32 bits: a number in fp32, or a pair in bf16, which is multiplied and
summed in one go.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dflash_local.free_memory import cpu_fuses


@dataclass(frozen=True, slots=True)
class Lanes:
    """How this CPU holds numbers of a kind."""

    count: int
    """Lanes of a vector."""
    each: int
    """Numbers of a lane: 2 in bf16, 1 in fp32."""
    registers: int


@cache
def lanes_of(dtype: torch.dtype) -> Lanes | None:
    """The lanes for numbers of that kind; None where torch's operators serve better, or must."""
    if not cpu_fuses(half=dtype == torch.bfloat16) or team() is None or not _runs():
        return None
    if dtype == torch.bfloat16:
        return Lanes(16, 2, 32)
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return (Lanes(16, 1, 32) if wide else Lanes(8, 1, 16)) if dtype == torch.float32 else None


class Code:
    """A piece of code on its way; ``build`` is LLVM's builder, values are LLVM's too.

    Args:
        lanes: how the numbers are held that it reads and writes.
        names: what it is called with, in order.
    """

    def __init__(self, lanes: Lanes, *names: str) -> None:
        from llvmlite import ir  # 40 MB that a GPU has no use for

        self._ir = ir
        self.module, self.lanes = ir.Module(), lanes
        self.whole, self.lane, self.number = ir.IntType(64), ir.IntType(32), ir.FloatType()
        self.stored = ir.IntType(32 // lanes.each)
        """A number as it lies in memory."""
        self.vector, self.numbers, self.row = (
            ir.VectorType(kind, lanes.count) for kind in (self.lane, self.number, self.stored)
        )
        """A vector of lanes, of numbers in fp32, and as many stored ones."""
        self._address = ir.PointerType()
        kind = ir.FunctionType(ir.VoidType(), [self._address])
        function = ir.Function(self.module, kind, "run")
        self._front = ir.IRBuilder(function.append_basic_block())
        """Where variables are made, once, however often their place is passed."""
        self._body = function.append_basic_block()
        self.build = ir.IRBuilder(self._body)
        self._given = {
            name: self.load(self.place(function.args[0], index, self.whole), self.whole)
            for index, name in enumerate(names)
        }

    def __getitem__(self, name: str) -> Any:
        """A number that the code was called with."""
        return self._given[name]

    def address(self, name: str) -> Any:
        """A number that is an address."""
        return self.build.inttoptr(self._given[name], self._address)

    def finish(self) -> str:
        """The text for LLVM."""
        self.build.ret_void()
        self._front.branch(self._body)
        return str(self.module)

    # Numbers.

    def count(self, value: int) -> Any:
        """A 64-bit constant."""
        return self.whole(value)

    def all(self, kind: Any, value: float) -> Any:
        """A vector of one constant."""
        return self._ir.Constant(kind, [value] * self.lanes.count)

    def spread(self, value: Any) -> Any:
        """A vector of one value."""
        nothing = self._ir.Constant(
            self._ir.VectorType(value.type, self.lanes.count), self._ir.Undefined
        )
        first = self.build.insert_element(nothing, value, self.lane(0))
        return self.build.shuffle_vector(first, nothing, self.all(self.vector, 0))

    def least(self, one: Any, other: Any) -> Any:
        """The smaller of two whole numbers."""
        return self.build.select(self.build.icmp_signed("<", one, other), one, other)

    def larger(self, one: Any, other: Any) -> Any:
        """The larger of two vectors of numbers, and ``other`` where one of them is none."""
        return self.build.select(self.build.fcmp_ordered(">", one, other), one, other)

    def opened(self, row: Any) -> Any:
        """From stored numbers to fp32."""
        if self.lanes.each == 2:
            row = self.build.zext(row, self.vector)
            row = self.build.shl(row, self.all(self.vector, 16))
        return self.build.bitcast(row, self.numbers)

    def closed(self, numbers: Any) -> Any:
        """From fp32 to the nearest stored numbers, of two as near to the even one."""
        if self.lanes.each == 1:
            return self.build.bitcast(numbers, self.row)
        return self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", self.row, numbers)

    def add_products(self, total: Any, one: Any, other: Any) -> Any:
        """``total`` and the products of the numbers in two vectors of lanes."""
        if self.lanes.each == 2:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return self.call(name, self.numbers, total, one, other)
        one, other = (self.build.bitcast(lanes, self.numbers) for lanes in (one, other))
        return self.of_numbers("fma", one, other, total)

    def of_numbers(self, name: str, *given: Any) -> Any:
        """One of LLVM's functions of vectors of numbers."""
        return self.call(f"llvm.{name}.v{self.lanes.count}f32", self.numbers, *given)

    def over_numbers(self, name: str, *given: Any) -> Any:
        """One of those that make a number of a vector."""
        return self.call(f"llvm.vector.reduce.{name}.v{self.lanes.count}f32", self.number, *given)

    def call(self, name: str, result: Any, *given: Any) -> Any:
        """One of LLVM's own functions."""
        function = self.module.globals.get(name)
        if function is None:
            kind = self._ir.FunctionType(result, [value.type for value in given])
            function = self._ir.Function(self.module, kind, name)
        return self.build.call(function, given)

    # Memory.

    def place(self, address: Any, index: Any, kind: Any) -> Any:
        """The address of an element of that kind."""
        at = self.count(index) if isinstance(index, int) else index
        return self.build.gep(address, [at], source_etype=kind)

    def load(self, address: Any, kind: Any) -> Any:
        """What lies there; it need not be aligned beyond its elements."""
        return self.build.load(address, typ=kind, align=self._alignment(kind))

    def store(self, value: Any, address: Any) -> None:
        """Put it there; the same of the alignment."""
        self.build.store(value, address, align=self._alignment(value.type))

    def _alignment(self, kind: Any) -> int:
        element = getattr(kind, "element", kind)
        return 4 if element == self.number else element.width // 8

    def fetch(self, address: Any) -> None:
        """Ask for a cache line that will be read; the address need not be one."""
        read, near, data = self.lane(0), self.lane(3), self.lane(1)
        self.call("llvm.prefetch.p0", self._ir.VoidType(), address, read, near, data)

    def room(self, kind: Any, count: int) -> Any:
        """Memory for so many, until the code returns."""
        return self._front.alloca(kind, self.lane(count))

    def variable(self, value: Any) -> Variable:
        """What changes in a loop."""
        return Variable(self, value)

    def team(self) -> tuple[Any, Any]:
        """Which of the threads that run this together this is, from 0, and how many they are: they
        may be fewer than were asked for."""
        kind = self._ir.FunctionType(self.lane, []).as_pointer()

        def asked(function: Any) -> Any:
            address = ctypes.cast(function, ctypes.c_void_p).value or 0
            answer = self.build.call(self.build.inttoptr(self.count(address), kind), [])
            return self.build.zext(answer, self.whole)

        return asked(team().omp_get_thread_num), asked(team().omp_get_num_threads)

    @contextmanager
    def each(self, start: Any, stop: Any, step: Any) -> Iterator[Any]:
        """A loop over whole numbers from ``start`` to before ``stop``."""
        build = self.build
        index = self.variable(start)
        head, body, end = (build.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        now = index.value
        build.cbranch(build.icmp_signed("<", now, stop), body, end)
        build.position_at_end(body)
        yield now
        index.value = build.add(now, step)
        build.branch(head)
        build.position_at_end(end)


class Variable:
    """A value that changes, in a register once LLVM has seen it."""

    def __init__(self, code: Code, value: Any) -> None:
        self._code, self._kind = code, value.type
        self._place = code.room(value.type, 1)
        self.value = value

    @property
    def value(self) -> Any:
        """As it is here."""
        return self._code.load(self._place, self._kind)

    @value.setter
    def value(self, value: Any) -> None:
        self._code.store(value, self._place)


class Entry:
    """Compiled code, called with its numbers."""

    def __init__(self, code: Code) -> None:
        from llvmlite import binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
            cpu=llvm.get_host_cpu_name(),
            features=llvm.get_host_cpu_features().flatten(),
            opt=3,
        )
        module = llvm.parse_assembly(code.finish())
        module.triple, module.data_layout = target.triple, str(target.target_data)
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        passes = llvm.create_pass_builder(target, options)
        passes.getModulePassManager().run(module, passes)
        self._engine = llvm.create_mcjit_compiler(module, target)
        self._engine.finalize_object()
        self._address = self._engine.get_function_address("run")
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._address)

    def __call__(self, *numbers: int, threads: int = 1) -> None:
        """Run it, on several of torch's own threads at once where the code shares its work."""
        given = struct.pack(f"{len(numbers)}q", *numbers)
        if threads == 1:
            self._run(given)
        else:
            team().GOMP_parallel(self._address, given, threads, 0)


def use_threads(count: int) -> None:
    """Have torch work with so many threads, or as many as the system lets it have.

    torch counts on all that it asks for: what a smaller team leaves undone is silently missing.
    """
    if (found := team()) is not None:
        found.omp_set_dynamic(0)
        nested = found.omp_get_max_active_levels()
        count = min(count, found.omp_get_thread_limit()) if nested else 1
    torch.set_num_threads(count)


@cache
def _runs() -> bool:
    """Whether LLVM is whole and of a version that this speaks to."""
    try:
        code = Code(Lanes(8, 1, 16), "goal")
        code.store(code.build.add(code.team()[1], code.count(6)), code.address("goal"))
        goal = ctypes.c_int64()
        Entry(code)(ctypes.addressof(goal))
    except Exception:  # missing libraries, other signatures, a system that lets nothing run
        return False
    return goal.value == 7


@cache
def team() -> Any:
    """OpenMP as torch has loaded it, for the threads that torch has; None where it is another's."""
    try:
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libgomp.so.1"))
    except OSError:
        return None
    found.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    found.GOMP_parallel.restype = None
    return found
