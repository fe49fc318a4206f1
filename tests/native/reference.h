// reference: stored numbers by straightforward arithmetic, to compare kernels with, and the instruction sets here.
#ifndef TIERMEM_REFERENCE_H
#define TIERMEM_REFERENCE_H

#include <errno.h>
#include <math.h>
#include <string.h>
#include <vector>

#include "check.h"
#include "dtype.h"
#include "tiermem.h"

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Through frexp and double arithmetic.
inline uint16_t narrow_reference(float x, int mantissa_bits, int exponent_bits) {
    const uint32_t bits = bits_of(x);
    const uint16_t sign = (uint16_t)(bits >> 31 << 15);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const uint16_t infinity = (uint16_t)(((1 << exponent_bits) - 1) << mantissa_bits);
    if (isnan(x))
        return (uint16_t)(sign | infinity | 1);
    if (isinf(x))
        return (uint16_t)(sign | infinity);
    if (x == 0)
        return sign;
    int exponent;
    frexp((double)fabsf(x), &exponent);
    exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1; // denormals share the lowest
    const double unit = ldexp(1.0, exponent - mantissa_bits);
    const double steps = nearbyint((double)fabsf(x) / unit); // ties to even; the division is exact
    const uint32_t code = (uint32_t)steps + ((uint32_t)(exponent + bias - 1) << mantissa_bits);
    return (uint16_t)(sign | (code > infinity ? infinity : code));
}

inline float widen_reference(uint16_t half, int mantissa_bits, int exponent_bits) {
    const int exponent = (half >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = half & ((1 << mantissa_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    double x = exponent == 0 ? ldexp(mantissa, 1 - bias - mantissa_bits)
                             : ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    if (exponent == (1 << exponent_bits) - 1)
        x = mantissa ? NAN : INFINITY;
    return (float)(half & 0x8000 ? -x : x);
}

inline uint16_t narrow_half(float x, int dtype) {
    return dtype == TM_BF16 ? narrow_reference(x, 7, 8) : narrow_reference(x, 10, 5);
}

inline float widen_half(uint16_t half, int dtype) {
    return dtype == TM_BF16 ? widen_reference(half, 7, 8) : widen_reference(half, 10, 5);
}

inline bool is_nan_half(uint16_t half, int dtype) {
    return dtype == TM_BF16 ? (half & 0x7fff) > 0x7f80 : (half & 0x7fff) > 0x7c00;
}

// All of this processor, also where the tests are run with the environment holding them down.
inline std::vector<int> find_isas() {
    unsetenv("ATEN_CPU_CAPABILITY");
    std::vector<int> isas;
    for (int isa = 0; isa < 3; ++isa) {
        const int answer = tm_isa_choose(isa);
        printf("%s: %s\n", tm_isa_name(isa), answer == isa ? "here" : "not here");
        CHECK(answer == isa || answer == -ENOTSUP);
        if (answer == isa)
            isas.push_back(isa);
    }
    CHECK_EQUAL(tm_isa_choose(3), -ENOTSUP);
    CHECK_EQUAL(tm_isa_choose(-1), isas.back());
    return isas;
}

inline const tm_loops *loops_of(int isa) {
#if defined(__x86_64__)
    if (isa > 0)
        return isa == 1 ? &tm_loops_avx2 : &tm_loops_avx512;
#endif
    (void)isa;
    return &tm_loops_plain;
}

#endif
