"""Compiling Triton kernels ahead of time, for cards that are not here, with the assembler Triton brings along.

    built = compile_kernel(kernel, {"x": "*fp32", "n": "i32"}, {"BLOCK": 128}, capability=120)
    built.asm["cubin"], built.asm["ptx"], built.metadata.shared

The signature names the types of all arguments but the constexprs, as `triton.compiler` spells them.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90, 120)  # A100, H100/H200, the GeForce Blackwells
# Shared memory a program may have, KiB: CUDA C++ Programming Guide, technical specifications per compute capability.
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
_CODE = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);")


def compile_kernel(kernel, signature: dict[str, str], constants: dict[str, Any], capability: int, **options):
    """One `@triton.jit` function as Triton compiles it; raises what Triton raises where it cannot be built.

    Pointers, and integers named in the signature with a trailing `:16`, count as multiples of 16, as at a launch.
    options  num_warps, num_stages
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    types = {name: signature[name].removesuffix(":16") if name in signature else "constexpr" for name in names}
    missing = [name for name in names if types[name] == "constexpr" and name not in constants]
    unknown = [name for name in (*signature, *constants) if name not in names]
    if missing or unknown:
        raise ValueError(f"{kernel.__name__}: no type or value for {missing}; no argument of it: {unknown}")
    aligned = [name for name, type_ in signature.items() if type_.startswith("*") or type_.endswith(":16")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, values, attributes)
    target = GPUTarget("cuda", capability, 32)
    return compile(source, target=target, options=options)


def architecture(cubin: bytes) -> int:
    """The compute capability that a cubin is for, out of its ELF header's flags: 80, 90, 120 ..."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError(f"no ELF file: {cubin[:4]!r}")
    flags = int.from_bytes(cubin[48:52], "little")
    # Byte 8 tells the two places apart: newer files keep it in bits 8 to 15.
    return (flags >> 8) & 0xFF if cubin[8] >= 8 else flags & 0xFF


def instructions(cubin: bytes) -> list[str]:
    """The machine instructions of a kernel, in the order they lie in."""
    return [code[1] for line in _disassemble(cubin) if (code := _CODE.search(line))]


def _disassemble(cubin: bytes) -> list[str]:
    import triton

    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def loop_instructions(cubin: bytes) -> list[str]:
    """The machine instructions of a kernel's innermost loop: of what lies between a branch and the label behind it to
    which it goes, the shortest piece. ValueError where there is no loop.
    """
    passed, labels, loops = [], {}, []
    for line in _disassemble(cubin):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(passed)
        elif code := _CODE.search(line):
            passed.append(code[1])
            target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", code[1])
            if target and target[1] in labels:
                loops.append(passed[labels[target[1]] :])
    loops = [loop for loop in loops if len(loop) > 1]  # a kernel ends in a branch to itself
    if not loops:
        raise ValueError("a kernel without a loop")
    return min(loops, key=len)
