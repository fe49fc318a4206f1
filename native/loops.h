// loops: the inner loops of the kernels, one table of them for each instruction set. They run over
// memory that one thread owns and know nothing of tasks or argument checks.
#ifndef TIERMEM_LOOPS_H
#define TIERMEM_LOOPS_H

#include <stdint.h>

static const unsigned TM_NORM_LANES = 16;

// Scalars of one step, rounded to fp32 once.
struct tm_constants {
    float grad_scale, decay, step_size, eps, inv_sqrt_bias2;
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float momentum, one_minus_dampening;
};

// Where the random words of a part come from: the word of element i is a hash of (first + i), or the lower half of one
// shifted up, plus an offset. `start` is first * TM_HASH_STRIDE + one salt, `salt` the other. rounding.h says which
// numbers these are, and why.
struct tm_dither {
    uint32_t start, salt, shift, offset;
};

static const uint32_t TM_HASH_STRIDE = 0x7feb352du;

// One element's step in fp32, over arrays; moments that a rule has not are NULL.
typedef void tm_rule_loop(uint64_t n, float *p, float *const *moments, const float *g, const tm_constants *c);

enum tm_rule_loops {
    TM_LOOP_ADAMW,
    TM_LOOP_ADAM,
    TM_LOOP_ADAMW_LARGEST, // amsgrad
    TM_LOOP_ADAM_LARGEST,
    TM_LOOP_ADAGRAD,
    TM_LOOP_LION,
    TM_LOOP_SGD,
    TM_LOOP_SGD_MOMENTUM,
    TM_LOOP_SGD_NESTEROV,
    TM_NUM_RULE_LOOPS
};

// The memory of a fused loop: everything that one pass reads and writes.
struct tm_streams {
    void *weight, *master;
    const void *grad;
    void *m, *v;
    uint8_t *m_scales, *v_scales;
    bool is_streamed; // a copy that is only written may go past the caches: they would not hold it anyway
    tm_dither master_dither, moment_dithers[2]; // the moments share their salts
};

// Adam in one loop for one combination of dtypes (enum tm_dtype); the same bits as widening every part,
// the rule's loop, and narrowing every part. n is a multiple of TM_Q8_BLOCK.
struct tm_fused {
    int weight, master, grad, moment;
    bool is_decoupled, is_stochastic;
    void (*step)(uint64_t n, const tm_streams *streams, const tm_constants *c);
};

struct tm_loops {
    // dst[i] = float(src[i]); `narrow` rounds to nearest even, NaN stays NaN.
    void (*widen_bf16)(uint64_t n, const uint16_t *src, float *dst);
    void (*widen_f16)(uint64_t n, const uint16_t *src, float *dst);
    void (*narrow_bf16)(uint64_t n, const float *src, uint16_t *dst);
    void (*narrow_f16)(uint64_t n, const float *src, uint16_t *dst);
    // The same, rounded up in size when a random word is below the share that is cut off.
    void (*dither_bf16)(uint64_t n, const float *src, const uint32_t *words, uint16_t *dst);
    void (*dither_f16)(uint64_t n, const float *src, const uint32_t *words, uint16_t *dst);
    void (*random_words)(uint64_t n, const tm_dither *dither, uint32_t *words);
    // fp32 as a bf16 weight and the 16 bits that it lacks; `narrow_split` makes every NaN a quiet one that
    // the weight shows, `split` keeps every pattern.
    void (*widen_split)(uint64_t n, const uint16_t *weight, const uint16_t *low, float *dst);
    void (*narrow_split)(uint64_t n, const float *src, uint16_t *weight, uint16_t *low);
    void (*split)(uint64_t n, const float *src, uint16_t *weight, uint16_t *low);
    // 8-bit codes with one scale for 64 of them; words may be NULL: to nearest even.
    void (*widen_q8)(uint64_t n, const uint8_t *codes, const uint8_t *scales, float *dst);
    void (*widen_q8_positive)(uint64_t n, const uint8_t *codes, const uint8_t *scales, float *dst);
    void (*narrow_q8)(uint64_t n, const float *src, const uint32_t *words, uint8_t *codes, uint8_t *scales);
    void (*narrow_q8_positive)(uint64_t n, const float *src, const uint32_t *words, uint8_t *codes, uint8_t *scales);
    // Blocks of 64 weights with an fp32 scale, to and from fp32; see loops_blocks.h.
    void (*unpack_int8)(uint64_t num_blocks, const uint8_t *codes, const float *scales, float *dst);
    void (*unpack_nf4)(uint64_t num_blocks, const uint8_t *codes, const float *scales, float *dst);
    void (*pack_int8)(uint64_t num_blocks, const float *src, uint8_t *codes, float *scales);
    void (*pack_nf4)(uint64_t num_blocks, const float *src, uint8_t *codes, float *scales);
    // sum[i] = a[i] + b[i]; sum may be a or b.
    void (*add)(uint64_t n, const float *a, const float *b, float *sum);
    // lanes[i % 16] += x[i]^2 in float64, in the order of i, for n a multiple of 16.
    void (*add_squares)(uint64_t n, const float *x, double *lanes);
    tm_rule_loop *const *rules; // by enum tm_rule_loops
    const tm_fused *fused;
    unsigned num_fused;
};

extern const tm_loops tm_loops_plain, tm_loops_avx2, tm_loops_avx512;

#endif
