"""Facts about the compiled kernels, without a GPU: registers, spills, shared memory, load widths, matrix instructions,
buffers, and the instructions that a token costs.

Triton compiles for any target on any machine, and what makes a kernel slow shows in what comes out. These are facts of
the compiler and a model of the hardware, no measurement. What is asked of them is in `static_guard`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any

from .triton_config import (
    COMBINE_STEP,
    Config,
    Target,
    combine_warps,
    decode_config,
    next_power_of_2,
    parts,
    prefill_config,
)

WIDTHS = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Device:
    """Data sheet figures of the device that a target stands for."""

    target: Target
    shared_limit: int
    """Bytes of shared memory (LDS) that a block may have."""
    clock: float = 0.0
    """Hz, boost."""
    bandwidth: float = 0.0
    """Bytes/s of its memory."""


DEVICES = {
    device.target.name: device
    for device in (
        Device(Target("sm_80", 108), 163 << 10, 1.41e9, 1.555e12),  # A100 40 GB
        Device(Target("sm_89", 128), 99 << 10, 2.52e9, 1.008e12),  # RTX 4090
        Device(Target("sm_90", 132), 227 << 10, 1.755e9, 3.35e12),  # H100 SXM
        Device(Target("sm_100", 148), 227 << 10, 1.965e9, 8.0e12),  # B200
        Device(Target("sm_120", 170), 99 << 10, 2.407e9, 1.792e12),  # RTX 5090
        Device(Target("gfx942", 304), 64 << 10, 2.1e9, 5.3e12),  # MI300X
    )
}
ISSUE_SLOTS = 4  # warp instructions that a multiprocessor can issue a cycle


@dataclass(frozen=True)
class Case:
    """One kernel, one use of it, one target."""

    kernel: str
    """decode, prefill, combine, write or copy."""
    target: str
    dtype: str = "bf16"
    key_dim: int = 128
    value_dim: int | None = None
    group: int = 4
    block_size: int = 16
    kv_heads: int = 8
    q_len: int = 1
    options: tuple[str, ...] = ()
    """Of softcap, window, sinks, alibi."""
    config: Config | None = None
    """Instead of what the rules give."""
    skew: int = 0
    """Elements added to the slot stride: a fault to plant, since vectors then do not begin at multiples of 16 bytes."""

    def __str__(self) -> str:
        dims = f"{self.key_dim}" if self.value_dim in (None, self.key_dim) else f"{self.key_dim}/{self.value_dim}"
        words = [self.kernel, self.target, self.dtype, f"D{dims}", f"group {self.group}", f"block {self.block_size}"]
        if self.q_len > 1 and self.kernel == "decode":
            words.append(f"{self.q_len} tokens")
        return " ".join((*words, *self.options))


@dataclass
class Facts:
    """What came out. Figures of the loop are those of the one that goes over the tokens, for one warp."""

    case: str
    tile: int = 0
    m: int = 0
    warps: int = 0
    stages: int = 0
    registers: int = 0
    spilled: int = 0
    """Bytes of local memory (scratch) a thread."""
    shared: int = 0
    buffers: int = 0
    """Tiles of keys and values that are in shared memory at a time."""
    loop: int = 0
    """Instructions."""
    matrix: dict[str, int] = field(default_factory=dict)
    loads: list[dict[str, int]] = field(default_factory=list)
    """Of each loop over tokens: loads from global memory, asynchronous copies to shared memory too, by opcode."""
    per_token: float = 0.0
    """Warp instructions of a block for a token of KV."""
    issue_share: float = 0.0
    """Issue slots needed at full memory bandwidth, as a share of what the device has."""


def facts_of(case: Case) -> Facts:
    """Compile a case and read off its facts.

    Raises:
        RuntimeError: the compiler's disassembler is missing or says something unknown.
    """
    function, signature, constants, attributes, options, config = _source(case)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if case.target.startswith("sm_"):
        target = GPUTarget("cuda", int(case.target[3:]), 32)
    else:
        target = GPUTarget("hip", case.target, 64)
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=target, options=options)
    facts = Facts(str(case), warps=options["num_warps"], shared=compiled.metadata.shared)
    if config is not None:
        facts.tile, facts.m, facts.stages = config.tile, config.m, config.stages
    if case.target.startswith("sm_"):
        _read_nvidia(facts, compiled.asm["cubin"], compiled.asm["ttgir"])
    else:
        _read_amd(facts, compiled.asm["amdgcn"], compiled.asm["ttgir"])
    if facts.loop and facts.tile:
        device = DEVICES[case.target]
        facts.per_token = facts.loop * facts.warps / facts.tile
        token_bytes = (case.key_dim + (case.value_dim or case.key_dim)) * WIDTHS[case.dtype]
        tokens = device.bandwidth / token_bytes  # a second
        slots = device.target.multiprocessors * ISSUE_SLOTS * device.clock
        facts.issue_share = facts.per_token * tokens / slots
    return facts


def _source(case: Case) -> tuple[Any, dict, dict, dict, dict, Config | None]:
    """What Triton wants to compile: the function, types, constants, divisibilities and options, as `gpu` has it."""
    from . import triton_decode, triton_prefill, triton_store

    device = DEVICES[case.target]
    value_dim = case.value_dim or case.key_dim
    dim, size = max(case.key_dim, value_dim), WIDTHS[case.dtype]
    together = 2 if value_dim == case.key_dim else 1  # keys and values are in one tensor
    pointer = f"*{case.dtype}"
    constants: dict[str, Any] = {}
    for name, width in (("KEY", case.key_dim), ("VALUE", value_dim)):
        slot = width + case.skew
        head = case.block_size * slot
        in_blocks = {"BLOCK": together * case.kv_heads * head, "HEAD": head, "SLOT": slot}
        constants |= {f"{name}_{stride}": number for stride, number in in_blocks.items()}
        first, second = parts(width, size, device.target)
        constants |= {f"{name}_DIM": width, f"{name}_1": first, f"{name}_2": second}
    precision = "tf32x3" if size == 4 and device.target.is_nvidia else "ieee"
    constants |= {"BLOCK_SIZE": case.block_size, "KV_HEADS": case.kv_heads, "GROUP": case.group, "Q_LEN": case.q_len}
    constants |= {option.upper(): option in case.options for option in ("softcap", "window", "sinks", "alibi")}
    constants |= {"SPLIT": True, "CHUNK": 0, "PRECISION": precision}
    types = {"out": pointer, "query": pointer, "key_blocks": pointer, "value_blocks": pointer, "block_table": "*i32"}
    types |= {"positions": "*i32", "partial": "*fp32", "key": pointer, "value": pointer, "sinks": "*fp32"}
    types |= {"slopes": "*fp32", "scale": "fp32", "softcap": "fp32", "blocks": pointer, "pairs": "*i32"}
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
    config = None
    if case.kernel in ("decode", "prefill"):
        config = case.config
        if case.kernel == "decode":
            function = triton_decode.decode_kernel
            config = config or decode_config(device.target, case.key_dim, value_dim, size, case.group * case.q_len)
        else:
            function = triton_prefill.prefill_kernel
            config = config or prefill_config(device.target, case.key_dim, value_dim, size)
        constants |= {"M": config.m, "TILE": config.tile}
        options |= {"num_warps": config.warps, "num_stages": config.stages}
        for option, name in (("sinks", "sinks"), ("alibi", "slopes")):
            if option not in case.options:
                constants[name] = None
    elif case.kernel == "combine":
        function = triton_decode.combine_kernel
        constants |= {"WIDTH": next_power_of_2(value_dim), "STEP": COMBINE_STEP}
        options["num_warps"] = combine_warps(value_dim)
    elif case.kernel == "write":
        function = triton_store.write_kernel
        constants |= {"WIDTH": min(4096, next_power_of_2(case.kv_heads * dim))}
    else:
        function = triton_store.copy_kernel
        block = 2 * case.kv_heads * case.block_size * case.key_dim
        constants |= {"STRIDE": block, "SIZE": block, "WIDTH": min(4096, next_power_of_2(block))}
    # As a projection gives them: `[rows, tokens, heads, dim]`, seen as `[rows, heads, tokens, dim]`.
    strides = {}
    for name, heads, width in (
        ("query", case.kv_heads * case.group, case.key_dim),
        ("key", case.kv_heads, case.key_dim),
        ("value", case.kv_heads, value_dim),
    ):
        strides |= {f"{name}_row": heads * width, f"{name}_head": width, f"{name}_token": heads * width}
    signature, values, attributes = {}, {}, {}
    plain = {parameter.num for parameter in function.params if parameter.do_not_specialize}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[index,] = constants[name]
            continue
        signature[name] = types.get(name, "i32")
        if signature[name].startswith("*"):
            attributes[index,] = [["tt.divisibility", 16]]
            if not device.target.is_nvidia and name not in ("key_blocks", "value_blocks", "blocks"):
                attributes[index,].append(["tt.pointer_range", 32])  # a pool has more than 2 GiB, the others have not
        elif index not in plain and strides.get(name, 1) % 16 == 0:
            attributes[index,] = [["tt.divisibility", 16]]
    return function, signature, values, attributes, options, config


# Reading what the compilers wrote -------------------------------------------------------------------------------------

_SASS_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", re.M)


def _read_nvidia(facts: Facts, cubin: bytes, ttgir: str) -> None:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run(
                [knobs.nvidia.cuobjdump.path, flag, file.name], capture_output=True, text=True, check=True
            ).stdout
            for flag in ("--dump-resource-usage", "-sass")
        )
    facts.registers = int(re.search(r"REG:(\d+)", usage)[1])
    facts.spilled = int(re.search(r"STACK:(\d+)", usage)[1])
    lines = [(int(place, 16), opcode, rest) for place, opcode, rest in _SASS_LINE.findall(sass)]
    if any(opcode.startswith(("LDL", "STL")) for _, opcode, _ in lines):
        facts.spilled = max(facts.spilled, 1)
    bodies = []
    # What comes after the end are places where the hardware waits; their branches back are no loops.
    end = max((place for place, opcode, _ in lines if opcode == "EXIT"), default=0)
    for place, opcode, rest in lines:
        if place > end:
            break
        target = re.search(r"0x([0-9a-f]+)", rest)
        if opcode.startswith("BRA") and target and int(target[1], 16) < place:
            bodies.append([x for x in lines if int(target[1], 16) <= x[0] <= place])
    _read_loop(facts, bodies, ("HMMA", "HGMMA", "UTCHMMA", "UTCMMA", "WGMMA", "DMMA"), ("LDG", "LDGSTS", "UTMALDG"))
    facts.buffers = _buffers(ttgir)


_LOOP_BLOCK = re.compile(r"^\.L(BB\d+_\d+):.*(?:=>This (?:Inner )?Loop Header|in Loop: Header=(BB\d+_\d+))")


def _read_amd(facts: Facts, assembly: str, ttgir: str) -> None:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1])

    facts.registers = number("vgpr_count")
    facts.spilled = max(number("private_segment_fixed_size"), number("vgpr_spill_count"))
    bodies: dict[str, list] = {}  # the compiler says of each basic block which loop it is in
    header = None
    for place, line in enumerate(assembly.splitlines()):
        if re.match(r"^\.LBB", line):
            found = _LOOP_BLOCK.match(line)
            header = (found[2] or found[1]) if found else None
        elif header and (instruction := re.match(r"^\s+([a-z]+_\w+)\s*(.*)", line)):
            bodies.setdefault(header, []).append((place, instruction[1], instruction[2]))
    _read_loop(facts, list(bodies.values()), ("v_mfma",), ("global_load", "buffer_load"))
    facts.buffers = max(1, _buffers(ttgir))


def _read_loop(facts: Facts, bodies: list[list], matrix: tuple[str, ...], loads: tuple[str, ...]) -> None:
    """Of the loops that multiply matrices, figures of the one with the fewest instructions, which is the one over whole
    tiles, and the widths of loads of all."""
    bodies = [body for body in bodies if any(opcode.startswith(matrix) for _, opcode, _ in body)]
    if not bodies:
        return
    body = min(bodies, key=len)
    facts.loop = sum(not opcode.startswith("NOP") for _, opcode, _ in body)
    for _, opcode, _ in body:
        if opcode.startswith(matrix):
            kind = opcode.split(".")[0] if opcode[0].isupper() else opcode
            facts.matrix[kind] = facts.matrix.get(kind, 0) + 1
    for body in bodies:
        found: dict[str, int] = {}
        for _, opcode, _ in body:
            if opcode.split(".")[0] in loads or opcode.startswith(("global_load", "buffer_load")):
                found[opcode] = found.get(opcode, 0) + 1
        facts.loads.append(found)


def _buffers(ttgir: str) -> int:
    """How many tiles the loop's buffers in shared memory hold: the leading dimension of what it allocates for them."""
    found = re.findall(r"ttg\.local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x\d+x\d+x\w+,[^>]*mutable", ttgir)
    return min((int(count) for count in found), default=0)
