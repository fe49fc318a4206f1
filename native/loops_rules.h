// The optimizers' arithmetic, in fp32 over arrays. Part of loops_body.h; tiermem.h holds the formulas.

namespace {

// One element, or a register of them.
template <class Float> struct AdamElement { Float p, m, v; };

// The order of the operations is a promise (tiermem.h): it decides the bits.
template <bool is_decoupled, class Float>
inline AdamElement<Float> adam_moments(Float p, Float m, Float v, Float g, const tm_constants &c) {
    g = g * c.grad_scale;
    if (is_decoupled)
        p = p * c.decay;
    else
        g = g + c.decay * p;
    m = m + (g - m) * c.one_minus_beta1;
    v = v * c.beta2 + (g * g) * c.one_minus_beta2;
    return {p, m, v};
}

template <class Float> inline Float adam_moved(Float p, Float m, Float v, const tm_constants &c) {
    return p - c.step_size * (m / (square_root(v) * c.inv_sqrt_bias2 + c.eps));
}

template <bool is_decoupled>
void adam(uint64_t n, float *p, float *const *moments, const float *g, const tm_constants *constants) {
    const tm_constants c = *constants;
    float *m = moments[0], *v = moments[1];
#pragma GCC ivdep
    for (uint64_t i = 0; i < n; ++i) {
        const AdamElement<float> e = adam_moments<is_decoupled>(p[i], m[i], v[i], g[i], c);
        m[i] = e.m;
        v[i] = e.v;
        p[i] = adam_moved(e.p, e.m, e.v, c);
    }
}

// NaN wins, whichever of the two it is.
inline float larger(float a, float b) { return float_of(select((b > a) | (b != b), bits_of(b), bits_of(a))); }

template <bool is_decoupled>
void adam_largest(uint64_t n, float *p, float *const *moments, const float *g, const tm_constants *constants) {
    const tm_constants c = *constants;
    float *m = moments[0], *v = moments[1], *largest = moments[2];
#pragma GCC ivdep
    for (uint64_t i = 0; i < n; ++i) {
        const AdamElement<float> e = adam_moments<is_decoupled>(p[i], m[i], v[i], g[i], c);
        const float most = larger(largest[i], e.v);
        m[i] = e.m;
        v[i] = e.v;
        largest[i] = most;
        p[i] = adam_moved(e.p, e.m, most, c);
    }
}

void adagrad(uint64_t n, float *p, float *const *moments, const float *g, const tm_constants *constants) {
    const tm_constants c = *constants;
    float *sum = moments[0];
#pragma GCC ivdep
    for (uint64_t i = 0; i < n; ++i) {
        const float grad = g[i] * c.grad_scale + c.decay * p[i];
        const float sum_i = sum[i] + grad * grad;
        sum[i] = sum_i;
        p[i] = p[i] - c.step_size * (grad / (__builtin_sqrtf(sum_i) + c.eps));
    }
}

// -1, 0 or 1; NaN stays NaN.
inline float sign_of(float x) {
    const uint32_t one = bits_of(1.0f) | (bits_of(x) & 0x80000000u);
    return float_of(select((x == 0.0f) | (x != x), bits_of(x), one));
}

void lion(uint64_t n, float *p, float *const *moments, const float *g, const tm_constants *constants) {
    const tm_constants c = *constants;
    float *m = moments[0];
#pragma GCC ivdep
    for (uint64_t i = 0; i < n; ++i) {
        const float grad = g[i] * c.grad_scale;
        const float update = sign_of(m[i] * c.beta1 + grad * c.one_minus_beta1);
        p[i] = p[i] * c.decay - c.step_size * update;
        m[i] = m[i] * c.beta2 + grad * c.one_minus_beta2;
    }
}

void sgd(uint64_t n, float *p, float *const *, const float *g, const tm_constants *constants) {
    const tm_constants c = *constants;
#pragma GCC ivdep
    for (uint64_t i = 0; i < n; ++i)
        p[i] = p[i] - c.step_size * (g[i] * c.grad_scale + c.decay * p[i]);
}

template <bool is_nesterov>
void sgd_momentum(uint64_t n, float *p, float *const *moments, const float *g, const tm_constants *constants) {
    const tm_constants c = *constants;
    float *m = moments[0];
#pragma GCC ivdep
    for (uint64_t i = 0; i < n; ++i) {
        const float grad = g[i] * c.grad_scale + c.decay * p[i];
        const float moment = m[i] * c.momentum + grad * c.one_minus_dampening;
        m[i] = moment;
        p[i] = p[i] - c.step_size * (is_nesterov ? grad + c.momentum * moment : moment);
    }
}

tm_rule_loop *const RULES[TM_NUM_RULE_LOOPS] = {
    adam<true>, adam<false>, adam_largest<true>,  adam_largest<false>, adagrad,
    lion,       sgd,         sgd_momentum<false>, sgd_momentum<true>,
};

} // namespace
