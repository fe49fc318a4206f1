// The text of every loop, compiled once for each instruction set by loops_<isa>.cpp, which defines
// TM_LOOPS (the table's name) and TM_DOUBLES (float64 numbers in one vector register).
//
//     loops_element.h   one element in every stored form, and random words
//     loops_vector.h    two registers of elements, likewise
//     loops_q8.h        64 elements as 8-bit codes
//     loops_blocks.h    64 frozen weights as codes with a scale
//     loops_rules.h     the optimizers' arithmetic, over fp32 arrays
//     loops_adam.h      Adam fused with the stored forms
//
// Every operation is written out so that all compilations do the same roundings: no FMA (contraction
// is off), true division and square root. Nothing here may call or instantiate an inline function of a
// library: the linker could keep the copy made for the widest instruction set and run it everywhere.

#include "loops.h"

#if defined(__SSE2__)
#include <immintrin.h> // its functions are inlined everywhere, by attribute
#endif

#include "loops_element.h"

#include "loops_vector.h"

#include "loops_blocks.h"
#include "loops_q8.h"
#include "loops_rules.h"

#include "loops_adam.h"

namespace {

void widen_bf16(uint64_t n, const uint16_t *__restrict src, float *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i)
        dst[i] = from_bf16(src[i]);
}

void widen_f16(uint64_t n, const uint16_t *__restrict src, float *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i)
        dst[i] = from_f16(src[i]);
}

void narrow_bf16(uint64_t n, const float *__restrict src, uint16_t *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i)
        dst[i] = to_bf16(src[i]);
}

void narrow_f16(uint64_t n, const float *__restrict src, uint16_t *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i)
        dst[i] = to_f16(src[i]);
}

void dither_bf16(uint64_t n, const float *__restrict src, const uint32_t *__restrict words, uint16_t *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i)
        dst[i] = to_bf16(src[i], words[i]);
}

void dither_f16(uint64_t n, const float *__restrict src, const uint32_t *__restrict words, uint16_t *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i)
        dst[i] = to_f16(src[i], words[i]);
}

void widen_split(uint64_t n, const uint16_t *__restrict weight, const uint16_t *__restrict low, float *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i)
        dst[i] = from_split(weight[i], low[i]);
}

template <bool is_exact>
void narrow_split(uint64_t n, const float *__restrict src, uint16_t *__restrict weight, uint16_t *__restrict low) {
    for (uint64_t i = 0; i < n; ++i) {
        const uint32_t bits = is_exact ? splittable(bits_of(src[i])) : shown_nan(src[i]);
        weight[i] = weight_of_split(bits);
        low[i] = (uint16_t)bits;
    }
}

void add(uint64_t n, const float *a, const float *b, float *sum) {
    // An element depends on no other, so `sum` being `a` or `b` itself is no obstacle.
#pragma GCC ivdep
    for (uint64_t i = 0; i < n; ++i)
        sum[i] = a[i] + b[i];
}

typedef double doubles __attribute__((vector_size(8 * TM_DOUBLES)));
typedef float narrow_floats __attribute__((vector_size(4 * TM_DOUBLES)));

void add_squares(uint64_t n, const float *x, double *lanes) {
    const unsigned num_vectors = TM_NORM_LANES / TM_DOUBLES;
    doubles sums[num_vectors];
    __builtin_memcpy(sums, lanes, sizeof sums);
    for (uint64_t i = 0; i < n; i += TM_NORM_LANES) {
#pragma GCC unroll 16
        for (unsigned k = 0; k < num_vectors; ++k) {
            narrow_floats part;
            __builtin_memcpy(&part, x + i + k * TM_DOUBLES, sizeof part);
            const doubles wide = __builtin_convertvector(part, doubles);
            sums[k] += wide * wide; // exact product: 24 + 24 bits fit in 53
        }
    }
    __builtin_memcpy(lanes, sums, sizeof sums);
}

} // namespace

const tm_loops TM_LOOPS = {
    widen_bf16,
    widen_f16,
    narrow_bf16,
    narrow_f16,
    dither_bf16,
    dither_f16,
    random_words,
    widen_split,
    narrow_split<false>,
    narrow_split<true>,
    widen_q8<SignedQ8>,
    widen_q8<PositiveQ8>,
    narrow_q8<SignedQ8>,
    narrow_q8<PositiveQ8>,
    unpack_int8,
    unpack_nf4,
    pack_int8,
    pack_nf4,
    add,
    add_squares,
    RULES,
    FUSED,
    sizeof FUSED / sizeof FUSED[0],
};
