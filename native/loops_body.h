// The text of every loop, compiled once for each instruction set by loops_<isa>.cpp, which defines
// TM_LOOPS (the table's name) and TM_DOUBLES (float64 numbers in one vector register).
//
// Every operation is written out so that all compilations do the same roundings: no FMA (contraction
// is off), true division and square root. Conversions are integer arithmetic without branches, which
// compilers vectorise for any width. Nothing here may call or instantiate an inline function of a
// library: the linker could keep the copy made for the widest instruction set and run it everywhere.

#include "loops.h"

namespace {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// By masks: nested conditions would become jumps, and no vectors.
inline uint32_t select(bool condition, uint32_t yes, uint32_t no) { return no ^ ((yes ^ no) & -(uint32_t)condition); }

void widen_bf16(uint64_t n, const uint16_t *__restrict src, float *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i)
        dst[i] = float_of((uint32_t)src[i] << 16);
}

// Rebases the exponent; a denormal becomes normal by letting one subtraction shift it (exact).
void widen_f16(uint64_t n, const uint16_t *__restrict src, float *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i) {
        const uint32_t half = src[i];
        const uint32_t shifted = (half & 0x7fffu) << 13;
        const uint32_t exponent = shifted & 0x0f800000u;
        const uint32_t rebased = shifted + (112u << 23);
        const uint32_t denormal = bits_of(float_of(rebased + (1u << 23)) - float_of(113u << 23));
        uint32_t bits = select(exponent == 0, denormal, rebased);
        bits = select(exponent == 0x0f800000u, rebased + (112u << 23), bits);
        dst[i] = float_of(bits | (half & 0x8000u) << 16);
    }
}

void narrow_bf16(uint64_t n, const float *__restrict src, uint16_t *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(src[i]);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const uint32_t quiet = (bits >> 16) | 0x40u;
        dst[i] = (uint16_t)select((bits & 0x7fffffffu) > 0x7f800000u, quiet, rounded);
    }
}

// Denormal results are rounded by the adder: 0.5 has its last bit where theirs is.
void narrow_f16(uint64_t n, const float *__restrict src, uint16_t *__restrict dst) {
    for (uint64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(src[i]);
        const uint32_t size = bits & 0x7fffffffu;
        const uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
        const uint32_t denormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
        uint32_t half = select(size < (113u << 23), denormal, normal);
        half = select(size >= (143u << 23), 0x7c00u, half);
        half = select(size > 0x7f800000u, 0x7e00u, half);
        dst[i] = (uint16_t)(half | (bits >> 31) << 15);
    }
}

void add(uint64_t n, const float *a, const float *b, float *sum) {
    // An element depends on no other, so `sum` being `a` or `b` itself is no obstacle.
#pragma GCC ivdep
    for (uint64_t i = 0; i < n; ++i)
        sum[i] = a[i] + b[i];
}

typedef double doubles __attribute__((vector_size(8 * TM_DOUBLES)));
typedef float floats __attribute__((vector_size(4 * TM_DOUBLES)));

void add_squares(uint64_t n, const float *x, double *lanes) {
    const unsigned num_vectors = TM_NORM_LANES / TM_DOUBLES;
    doubles sums[num_vectors];
    __builtin_memcpy(sums, lanes, sizeof sums);
    for (uint64_t i = 0; i < n; i += TM_NORM_LANES) {
#pragma GCC unroll 16
        for (unsigned k = 0; k < num_vectors; ++k) {
            floats part;
            __builtin_memcpy(&part, x + i + k * TM_DOUBLES, sizeof part);
            const doubles wide = __builtin_convertvector(part, doubles);
            sums[k] += wide * wide; // exact product: 24 + 24 bits fit in 53
        }
    }
    __builtin_memcpy(lanes, sums, sizeof sums);
}

template <bool decoupled>
inline void adam(uint64_t n, float *__restrict p, float *__restrict m, float *__restrict v, const float *__restrict g,
                 const tm_adam_constants *scalars) {
    const tm_adam_constants c = *scalars;
    for (uint64_t i = 0; i < n; ++i) {
        float grad = g[i] * c.grad_scale;
        float param = p[i];
        if (decoupled)
            param = param * c.decay;
        else
            grad = grad + c.decay * param;
        const float first = m[i] + (grad - m[i]) * c.one_minus_beta1;
        const float second = v[i] * c.beta2 + (grad * grad) * c.one_minus_beta2;
        const float denominator = __builtin_sqrtf(second) * c.inv_sqrt_bias2 + c.eps;
        m[i] = first;
        v[i] = second;
        p[i] = param - c.step_size * (first / denominator);
    }
}

void adam_decoupled(uint64_t n, float *p, float *m, float *v, const float *g, const tm_adam_constants *scalars) {
    adam<true>(n, p, m, v, g, scalars);
}

void adam_coupled(uint64_t n, float *p, float *m, float *v, const float *g, const tm_adam_constants *scalars) {
    adam<false>(n, p, m, v, g, scalars);
}

} // namespace

const tm_loops TM_LOOPS = {widen_bf16, widen_f16,   narrow_bf16,    narrow_f16,
                           add,        add_squares, adam_decoupled, adam_coupled};
