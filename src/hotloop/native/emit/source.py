"""The whole C source and its header: weights, one instance's memory, and the functions a caller sees."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.native.emit.contraction import emit_matmul, emit_taps
from hotloop.native.emit.loops import emit_lookup, emit_map, emit_push, emit_reduce
from hotloop.native.emit.quantised import emit_quantised
from hotloop.native.emit.rows import emit_norm, emit_softmax
from hotloop.native.emit.writer import Target, Writer
from hotloop.native.graph import (
    Graph,
    Lookup,
    Loop,
    Map,
    MatMul,
    Node,
    Norm,
    Push,
    Reduce,
    Softmax,
    Taps,
    View,
)
from hotloop.native.passes.arena import Arena, plan_arena

__all__ = ["REPORT_BYTES", "Emitted", "emit_library", "emit_node"]

# Room for what the check found, filled in after the library was compiled.
REPORT_BYTES = 4096

_C_TYPES = {
    "float32": "float",
    "float64": "double",
    "int64": "int64_t",
    "int32": "int32_t",
    "int16": "int16_t",
    "uint8": "uint8_t",
    "int8": "int8_t",
    "bool": "uint8_t",
}


@dataclass
class Emitted:
    """C source, header, and how many bytes they put where."""

    source: str
    header: str
    weight_bytes: int
    arena_bytes: int
    state_bytes: int
    description: dict[str, Any]


def emit_node(writer: Writer, node: Node) -> None:
    """One node, inside braces of its own."""
    with writer.block():
        if node.origin.operation:
            module = f" in {node.origin.module}" if node.origin.module else ""
            # the file's name alone: a library that is handed on need not tell where it was built
            line = re.sub(r"^.*/", "", node.origin.line.partition(": ")[0])
            writer.line(
                f"/* {type(node).__name__}: {node.origin.operation}{module}{f', {line}' if line else ''} */"
            )
        if isinstance(node, Map):
            emit_map(writer, node)
        elif isinstance(node, Taps) and node.scale is not None:
            emit_quantised(writer, node)
        elif isinstance(node, Taps):
            emit_taps(writer, node)
        elif isinstance(node, MatMul):
            emit_matmul(writer, node)
        elif isinstance(node, Softmax):
            emit_softmax(writer, node)
        elif isinstance(node, Norm):
            emit_norm(writer, node)
        elif isinstance(node, Reduce):
            emit_reduce(writer, node)
        elif isinstance(node, Lookup):
            emit_lookup(writer, node)
        elif isinstance(node, Push):
            emit_push(writer, node)
        elif isinstance(node, Loop):
            with writer.block(f"for (long {node.symbol} = 0; {node.symbol} < {node.count}; {node.symbol}++)"):
                for item in node.body:
                    emit_node(writer, item)


def _convert_inputs(writer: Writer, graph: Graph, arena: Arena) -> None:
    """Inputs that are not float32 are converted into the arena first."""
    for index, (_, view) in enumerate(graph.inputs):
        dtype = view.buffer.dtype
        if dtype == "float32":
            writer.place(view.buffer, f"in{index}")
            continue
        start = arena.size
        arena.size += -(-view.count // 16) * 16 + 16
        writer.place(view.buffer, f"(A + {start})")
        writer.line(
            f"for (long i = 0; i < {view.count}; i++) "
            f"A[{start} + i] = (float)((const {_C_TYPES[dtype]} *)in{index})[i];"
        )


def emit_library(
    graph: Graph, target: Target, facts: dict[str, Any], *, observed: list[Taps] | None = None
) -> Emitted:
    """C for a whole graph. `facts` go into the description that the library carries.

    `observed`: contractions that shall note, for calibration, the largest magnitude they read and the rows they read
    last; where in the arena stands in the description under "observed".
    """
    arena = plan_arena(graph)
    writer = Writer(target)
    if observed is not None:
        writer.observe = {}
        for taps in observed:
            writer.observe[id(taps)] = arena.size
            arena.size += -(-(1 + taps.rows.size * taps.weight.shape[1]) // 16) * 16
        facts = facts | {"observed": list(writer.observe.values())}
    for index, (_, view) in enumerate(graph.outputs):
        writer.place(view.buffer, f"out{index}")
    for buffer in arena.buffers:
        writer.place(buffer, f"(A + {arena.offsets[id(buffer)]})")
    bodies = []
    for nodes, with_inputs in ((graph.prep, False), (graph.nodes, True)):
        writer.lines = []
        if with_inputs:
            _convert_inputs(writer, graph, arena)
        for node in nodes:
            emit_node(writer, node)
        bodies.append("\n".join(writer.lines))
    words = np.concatenate(writer.words) if writer.words else np.zeros(16, np.uint32)
    state_floats = arena.state
    description = facts | {
        "name": graph.name,
        "streaming": graph.streaming,
        "window": graph.window,
        "target": target.name,
        "inputs": [_describe(name, view) for name, view in graph.inputs],
        "outputs": [_describe(name, view) for name, view in graph.outputs],
        "weight_bytes": int(words.nbytes),
        "arena_bytes": arena.size * 4,
        "state_bytes": state_floats * 4 + 4 * (len(graph.rings) + 1),
    }
    source = _assemble(graph, writer, arena, words, bodies, description)
    return Emitted(
        source,
        _header(graph, description),
        int(words.nbytes),
        arena.size * 4,
        description["state_bytes"],
        description,
    )


def _describe(name: str, view: View) -> dict[str, Any]:
    return {"name": name, "shape": list(view.shape), "dtype": view.buffer.dtype}


def _parameters(graph: Graph) -> str:
    inputs = [f"const {_C_TYPES[view.buffer.dtype]} *in{i}" for i, (_, view) in enumerate(graph.inputs)]
    return ", ".join([*inputs, *(f"float *out{i}" for i in range(len(graph.outputs)))])


def _initial(arena: Arena) -> tuple[str, str]:
    """C that fills the state, and what is filled only on creation."""

    def fill(kinds: str) -> str:
        lines = []
        for buffer in arena.buffers:
            if buffer.kind != kinds or buffer.data is None or not np.any(buffer.data):
                continue
            start = arena.offsets[id(buffer)]
            values = np.unique(buffer.data)
            if values.size == 1:
                text = "-__builtin_inff()" if np.isneginf(values[0]) else f"{float(values[0])!r}"
                lines.append(f"    for (long i = 0; i < {buffer.size}; i++) A[{start} + i] = {text};")
            else:
                listed = ",".join(str(v) for v in buffer.data.view(np.uint32).tolist())
                lines.append(f"    static const uint32_t v{start}[{buffer.size}] = {{{listed}}};")
                lines.append(f"    memcpy(A + {start}, v{start}, sizeof v{start});")
        return "\n".join(lines)

    return fill("state"), fill("fixed")


def _assemble(
    graph: Graph,
    writer: Writer,
    arena: Arena,
    words: np.ndarray[Any, np.dtype[np.uint32]],
    bodies: list[str],
    description: dict[str, Any],
) -> str:
    name = graph.name
    prelude = (Path(__file__).parent / "prelude.h").read_text()
    listed = words.tolist()
    rows = [",".join(map(str, listed[i : i + 16])) for i in range(0, len(listed), 16)]
    state_fill, fixed_fill = _initial(arena)
    rings = "".join(f" int32_t ring{length};" for length in graph.rings)
    ring_reset = "".join(f" m->ring{length} = {length - 1};" for length in graph.rings)
    ring_load = "".join(f"    const long ring{length} = m->ring{length};\n" for length in graph.rings)
    ring_step = "".join(
        f"    m->ring{length} = m->ring{length} + 1 == {length} ? 0 : m->ring{length} + 1;\n"
        for length in graph.rings
    )
    # what prep computed is not saved but computed again, so its step of the rings is taken back
    back = {
        length: f"(m->ready ? (m->ring{length} + {length - 1}) % {length} : m->ring{length})"
        for length in graph.rings
    }
    ring_save = "".join(f"    p[{k}] = {back[length]};\n" for k, length in enumerate(graph.rings))
    warm_keep = "".join(f"    const int32_t was{length} = {back[length]};\n" for length in graph.rings)
    warm_back = "".join(f"    m->ring{length} = was{length};\n" for length in graph.rings)
    ring_restore = "".join(
        f"    if (p[{k}] < 0 || p[{k}] >= {length}) return -1;\n" for k, length in enumerate(graph.rings)
    ) + "".join(f"    m->ring{length} = p[{k}];\n" for k, length in enumerate(graph.rings))
    casts = ", ".join(
        [f"(const {_C_TYPES[v.buffer.dtype]} *)inputs[{i}]" for i, (_, v) in enumerate(graph.inputs)]
        + [f"(float *)outputs[{i}]" for i in range(len(graph.outputs))]
    )
    text = json.dumps(description)
    quoted = "\n".join(f"    {json.dumps(text[i : i + 100])}" for i in range(0, len(text), 100))
    scratch_in = max([view.count * 8 for _, view in graph.inputs] + [64])
    scratch_out = max([view.count * 4 for _, view in graph.outputs] + [64])
    types = [_C_TYPES[view.buffer.dtype] for _, view in graph.inputs]
    warm_arguments = ", ".join(
        [f"(const {kind} *)scratch_in" for kind in types] + ["(float *)scratch_out"] * len(graph.outputs)
    )
    return f"""/* Generated by hotloop.native from a trained model: {name}. See {name}.h for how it is called.
 * Compile without -ffast-math, and never link with it: gcc 12 then switches off denormals for the whole process. */
{prelude}
#include "{name}.h"

struct {name} {{
    F arena[{arena.size}] __attribute__((aligned(64)));
    F spare[{arena.state + 16}] __attribute__((aligned(64)));
    int32_t ready;{rings}
}};

static const uint32_t weights[{len(listed)}] __attribute__((aligned(64))) = {{
{("," + chr(10)).join(rows)}
}};
#define W ((const F *)weights)
{chr(10).join(writer.tables)}

/* Denormals are zero inside; what the caller had is restored. */
#if defined(__x86_64__)
#define FENCE __asm__ volatile("" ::: "memory")
#define ENTER unsigned csr = _mm_getcsr(); if ((csr & 0x8040) != 0x8040) _mm_setcsr(csr | 0x8040); FENCE
#define LEAVE FENCE; if ((csr & 0x8040) != 0x8040) _mm_setcsr(csr)
#else
#define ENTER
#define LEAVE
#endif

size_t {name}_size(void) {{ return sizeof(struct {name}); }}

void {name}_reset({name} *m) {{
    F *A = m->arena;
    memset(A, 0, {arena.state * 4});
{state_fill}
    m->ready = 0;{ring_reset}
}}

{name} *{name}_create(void *memory) {{
    {name} *m = ({name} *)memory;
    memset(m, 0, sizeof *m);
    F *A = m->arena;
    (void)A;
{fixed_fill}
    {name}_reset(m);
    return m;
}}

{name} *{name}_new(void) {{
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (sizeof(struct {name}) + 63) / 64 * 64)) return NULL;
    return {name}_create(memory);
}}

void {name}_delete({name} *m) {{ free(m); }}

static inline void prepare({name} *m) {{
    F *const A = m->arena;
    (void)A;
{ring_step}{ring_load}{bodies[0]}
    m->ready = 1;
}}

void {name}_prep({name} *m) {{
    if (m->ready) return;
    ENTER;
    prepare(m);
    LEAVE;
}}

void {name}_run({name} *restrict m, {_parameters(graph)}) {{
    F *const A = m->arena;
    (void)A;
    ENTER;
{f"    if (!m->ready) prepare(m);{chr(10)}    m->ready = 0;" if graph.streaming else ""}
{ring_load}{bodies[1]}
    LEAVE;
}}

void {name}_call({name} *m, const void *const *inputs, void *const *outputs) {{
    {name}_run(m, {casts});
}}

size_t {name}_state_size(void) {{ return {description["state_bytes"]}; }}

void {name}_state_save(const {name} *m, void *state) {{
    memcpy(state, m->arena, {arena.state * 4});
    int32_t *p = (int32_t *)((char *)state + {arena.state * 4});
    p[{len(graph.rings)}] = 0;
{ring_save}}}

int {name}_state_load({name} *m, const void *state) {{
    const int32_t *p = (const int32_t *)((const char *)state + {arena.state * 4});
    if (p[{len(graph.rings)}] != 0) return -1;
{ring_restore}    memcpy(m->arena, state, {arena.state * 4});
    m->ready = 0;
    return 0;
}}

void {name}_warm({name} *m, int times) {{
    static char scratch_out[{scratch_out}] __attribute__((aligned(64)));
    static const char scratch_in[{scratch_in}] __attribute__((aligned(64)));
    volatile uint32_t sink = 0;
    for (size_t i = 0; i < sizeof weights / 4; i += 16) sink += weights[i];
    for (size_t i = 0; i < sizeof m->arena / 4; i += 16) ((volatile F *)m->arena)[i] = m->arena[i];
    memcpy(m->spare, m->arena, {arena.state * 4});
{warm_keep}    for (int i = 0; i < times; i++) {name}_run(m, {warm_arguments});
    memcpy(m->arena, m->spare, {arena.state * 4});
{warm_back}    m->ready = 0;
}}

const char *{name}_describe(void) {{
    return
{quoted};
}}

const char {name}_report[{REPORT_BYTES}] __attribute__((aligned(64), visibility("default"))) = "HOTLOOP-REPORT {{}}";

/* How a program that loads any such library finds its functions. */
struct hotloop_table {{
    int32_t version, inputs, outputs, streaming;
    size_t (*size)(void);
    void *(*create)(void *);
    void (*call)(void *, const void *const *, void *const *);
    void (*prep)(void *);
    void (*reset)(void *);
    void (*warm)(void *, int);
    size_t (*state_size)(void);
    void (*state_save)(const void *, void *);
    int (*state_load)(void *, const void *);
    const char *(*describe)(void);
    const char *report;
}};
__attribute__((weak, visibility("default"))) const struct hotloop_table hotloop_table = {{
    1, {len(graph.inputs)}, {len(graph.outputs)}, {int(graph.streaming)},
    {name}_size, (void *(*)(void *)){name}_create,
    (void (*)(void *, const void *const *, void *const *)){name}_call, (void (*)(void *)){name}_prep,
    (void (*)(void *)){name}_reset, (void (*)(void *, int)){name}_warm, {name}_state_size,
    (void (*)(const void *, void *)){name}_state_save, (int (*)(void *, const void *)){name}_state_load,
    {name}_describe, {name}_report,
}};
"""


def _header(graph: Graph, description: dict[str, Any]) -> str:
    name = graph.name
    guard = f"HOTLOOP_{name.upper()}_H"
    shapes = "\n".join(
        f" *   {way}{i}: {item['name']}, {item['dtype']}, shape {tuple(item['shape'])}, C-contiguous"
        for way, items in (("in", description["inputs"]), ("out", description["outputs"]))
        for i, item in enumerate(items)
    )
    kind = (
        f"a state machine: each call takes one event (the model was built with windows of {graph.window})"
        if graph.streaming
        else "a function of its inputs: calls do not depend on each other"
    )
    return f"""#ifndef {guard}
#define {guard}
#include <stddef.h>
#include <stdint.h>
#if defined(__GNUC__)
#define HOTLOOP_API __attribute__((visibility("default")))
#else
#define HOTLOOP_API
#endif
#ifdef __cplusplus
extern "C" {{
#endif

/* {name}, {kind}.
{shapes}
 * Outputs must not overlap inputs. NaN in gives NaN out. Integers are exact up to 2^24; an index outside its table
 * is clamped into it. No function but _new and _delete allocates, none locks. One instance serves one thread at a
 * time; any number of instances may run at once. */
typedef struct {name} {name};

/* Bytes of an instance; make one in memory of your own (at a multiple of 64), or on the heap (NULL: no memory). */
HOTLOOP_API size_t {name}_size(void);
HOTLOOP_API {name} *{name}_create(void *memory);
HOTLOOP_API {name} *{name}_new(void);
HOTLOOP_API void {name}_delete({name} *m);

/* Compute. Of a state machine this is one event; call {name}_prep before the event is there, and only what depends
 * on the event is left to do. */
HOTLOOP_API void {name}_run({name} *m, {_parameters(graph)});
HOTLOOP_API void {name}_call({name} *m, const void *const *inputs, void *const *outputs);
HOTLOOP_API void {name}_prep({name} *m);

/* Forget all events; touch all memory and run `times` times on zeros, state unchanged. */
HOTLOOP_API void {name}_reset({name} *m);
HOTLOOP_API void {name}_warm({name} *m, int times);

/* Copy the state out and in; load returns -1, and changes nothing, if it is no state of this model. */
HOTLOOP_API size_t {name}_state_size(void);
HOTLOOP_API void {name}_state_save(const {name} *m, void *state);
HOTLOOP_API int {name}_state_load({name} *m, const void *state);

/* Shapes, sizes and precision as JSON; what the check against float64 found, after "HOTLOOP-REPORT ". */
HOTLOOP_API const char *{name}_describe(void);
HOTLOOP_API extern const char {name}_report[{REPORT_BYTES}];

#ifdef __cplusplus
}}
#endif
#endif
"""
