// loops: the inner loops of the kernels, one table of them for each instruction set. They run over
// memory that one thread owns and know nothing of tasks, dtypes' names or argument checks.
#ifndef TIERMEM_LOOPS_H
#define TIERMEM_LOOPS_H

#include <stdint.h>

// Scalars of one Adam step, rounded to fp32 once.
struct tm_adam_constants {
    float grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, step_size;
};

static const unsigned TM_NORM_LANES = 16;

struct tm_loops {
    // dst[i] = float(src[i]); `narrow` rounds to nearest even, NaN stays NaN.
    void (*widen_bf16)(uint64_t n, const uint16_t *src, float *dst);
    void (*widen_f16)(uint64_t n, const uint16_t *src, float *dst);
    void (*narrow_bf16)(uint64_t n, const float *src, uint16_t *dst);
    void (*narrow_f16)(uint64_t n, const float *src, uint16_t *dst);
    // sum[i] = a[i] + b[i]; sum may be a or b.
    void (*add)(uint64_t n, const float *a, const float *b, float *sum);
    // lanes[i % 16] += x[i]^2 in float64, in the order of i, for n a multiple of 16.
    void (*add_squares)(uint64_t n, const float *x, double *lanes);
    void (*adam_decoupled)(uint64_t n, float *p, float *m, float *v, const float *g, const tm_adam_constants *scalars);
    void (*adam_coupled)(uint64_t n, float *p, float *m, float *v, const float *g, const tm_adam_constants *scalars);
};

extern const tm_loops tm_loops_plain, tm_loops_avx2, tm_loops_avx512;

#endif
