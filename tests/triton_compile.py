"""Compiling Triton kernels ahead of time, for cards that are not here, with the assembler Triton brings along.

    cubin = compile_kernel(kernel, {"x": "*fp32", "n": "i32"}, {"BLOCK": 128}, capability=120)

The signature names the types of all arguments but the constexprs, as `triton.compiler` spells them.
"""

from typing import Any

CAPABILITIES = (80, 90, 120)  # A100, H100/H200, the GeForce Blackwells


def compile_kernel(
    kernel, signature: dict[str, str], constants: dict[str, Any], capability: int, num_warps: int = 4
) -> bytes:
    """The machine code of one `@triton.jit` function; raises what Triton raises where it cannot be built.

    Pointers, and integers named in the signature with a trailing `:16`, count as multiples of 16, as at a launch.
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
    return compile(source, target=target, options={"num_warps": num_warps}).asm["cubin"]


def architecture(cubin: bytes) -> int:
    """The compute capability that a cubin is for, out of its ELF header's flags: 80, 90, 120 ..."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError(f"no ELF file: {cubin[:4]!r}")
    flags = int.from_bytes(cubin[48:52], "little")
    # Byte 8 tells the two places apart: newer files keep it in bits 8 to 15.
    return (flags >> 8) & 0xFF if cubin[8] >= 8 else flags & 0xFF
