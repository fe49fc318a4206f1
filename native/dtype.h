// dtype: elements of a stored dtype seen as fp32, through the loops of an instruction set.
#ifndef TIERMEM_DTYPE_H
#define TIERMEM_DTYPE_H

#include <stdint.h>
#include <string.h>

#include "loops.h"
#include "tiermem.h"

static inline bool tm_dtype_is_stored(int dtype) { return dtype == TM_F32 || dtype == TM_BF16 || dtype == TM_F16; }

static inline bool tm_dtype_is_q8(int dtype) { return dtype == TM_Q8 || dtype == TM_Q8_POSITIVE; }

static inline unsigned tm_dtype_bytes(int dtype) { return dtype == TM_F32 ? 4 : tm_dtype_is_q8(dtype) ? 1 : 2; }

static inline const void *tm_dtype_at(const void *base, int dtype, uint64_t element) {
    return (const char *)base + element * tm_dtype_bytes(dtype);
}

static inline void *tm_dtype_at(void *base, int dtype, uint64_t element) {
    return (char *)base + element * tm_dtype_bytes(dtype);
}

// dst[i] = float(src[i]); src and dst do not overlap.
static inline void tm_dtype_widen(const tm_loops *loops, int dtype, uint64_t n, const void *src, float *dst) {
    if (dtype == TM_BF16)
        loops->widen_bf16(n, (const uint16_t *)src, dst);
    else if (dtype == TM_F16)
        loops->widen_f16(n, (const uint16_t *)src, dst);
    else
        memcpy(dst, src, n * sizeof(float));
}

// dst[i] = src[i] rounded to nearest even; src and dst do not overlap.
static inline void tm_dtype_narrow(const tm_loops *loops, int dtype, uint64_t n, const float *src, void *dst) {
    if (dtype == TM_BF16)
        loops->narrow_bf16(n, src, (uint16_t *)dst);
    else if (dtype == TM_F16)
        loops->narrow_f16(n, src, (uint16_t *)dst);
    else
        memcpy(dst, src, n * sizeof(float));
}

#endif
