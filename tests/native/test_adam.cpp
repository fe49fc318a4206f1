// Is one Adam step what the formula says, and the same bits from every instruction set and thread count?

#include <errno.h>
#include <math.h>
#include <string.h>
#include <vector>

#include "check.h"
#include "dtype.h"
#include "tiermem.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

static const uint64_t N = 3 * 65536 + 1237; // several tasks, an odd end

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Straightforward conversions to compare with: through frexp and double arithmetic.
static uint16_t narrow_reference(float x, int mantissa_bits, int exponent_bits) {
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

static float widen_reference(uint16_t half, int mantissa_bits, int exponent_bits) {
    const int exponent = (half >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = half & ((1 << mantissa_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    double x = exponent == 0 ? ldexp(mantissa, 1 - bias - mantissa_bits)
                             : ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    if (exponent == (1 << exponent_bits) - 1)
        x = mantissa ? NAN : INFINITY;
    return (float)(half & 0x8000 ? -x : x);
}

static bool is_nan_half(uint16_t half, int dtype) {
    return dtype == TM_BF16 ? (half & 0x7fff) > 0x7f80 : (half & 0x7fff) > 0x7c00;
}

static std::vector<int> find_isas() {
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

static const tm_loops *loops_of(int isa) {
#if defined(__x86_64__)
    if (isa > 0)
        return isa == 1 ? &tm_loops_avx2 : &tm_loops_avx512;
#endif
    (void)isa;
    return &tm_loops_plain;
}

static void every_half_widens_exactly(int isa, int dtype) {
    std::vector<uint16_t> halves(65536);
    std::vector<float> floats(65536);
    for (uint32_t i = 0; i < 65536; ++i)
        halves[i] = (uint16_t)i;
    (dtype == TM_BF16 ? loops_of(isa)->widen_bf16 : loops_of(isa)->widen_f16)(65536, halves.data(), floats.data());
    for (uint32_t i = 0; i < 65536; ++i) {
        const float wanted =
            dtype == TM_BF16 ? widen_reference((uint16_t)i, 7, 8) : widen_reference((uint16_t)i, 10, 5);
        CHECK(isnan(wanted) ? isnan(floats[i]) : bits_of(floats[i]) == bits_of(wanted));
    }
}

static void floats_narrow_to_the_nearest_even(int isa, int dtype) {
    std::vector<float> floats;
    Numbers numbers{5};
    for (uint32_t upper = 0; upper < 65536; ++upper) // every upper half, with lower halves that decide ties
        for (uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, (uint32_t)numbers.next() >> 16,
                               0x1000u, 0x0fffu, 0x1001u, 0x3000u}) {
            const uint32_t bits = upper << 16 | lower;
            float x;
            memcpy(&x, &bits, sizeof x);
            floats.push_back(x);
        }
    std::vector<uint16_t> halves(floats.size());
    tm_dtype_narrow(loops_of(isa), dtype, floats.size(), floats.data(), halves.data());
    for (size_t i = 0; i < floats.size(); ++i) {
        const uint16_t wanted =
            dtype == TM_BF16 ? narrow_reference(floats[i], 7, 8) : narrow_reference(floats[i], 10, 5);
        CHECK(isnan(floats[i]) ? is_nan_half(halves[i], dtype) : halves[i] == wanted);
    }
}

struct State {
    // One element more in front: pointers are then aligned to their element and no further.
    std::vector<float> master, m, v;
    std::vector<char> grad, low;

    State(int grad_dtype, int low_dtype, uint64_t seed)
        : master(N + 1), m(N + 1), v(N + 1), grad((N + 1) * 4), low((N + 1) * 4) {
        Numbers numbers{seed};
        std::vector<float> values(N + 1);
        for (uint64_t i = 0; i <= N; ++i) {
            master[i] = numbers.uniform();
            m[i] = numbers.uniform() * 0.1f;
            v[i] = fabsf(numbers.uniform()) * 0.01f;
            values[i] = numbers.uniform() * (i % 7 == 0 ? 1e-6f : 1.0f);
        }
        v[5] = 0;
        v[6] = m[6] = values[6] = 1e-40f; // denormals count
        tm_dtype_narrow(&tm_loops_plain, grad_dtype, N + 1, values.data(), grad.data());
        if (low_dtype != TM_NONE)
            tm_dtype_narrow(&tm_loops_plain, low_dtype, N + 1, master.data(), low.data());
    }
    bool operator==(const State &other) const {
        const size_t bytes = (N + 1) * sizeof(float);
        return memcmp(master.data(), other.master.data(), bytes) == 0 && memcmp(m.data(), other.m.data(), bytes) == 0 &&
               memcmp(v.data(), other.v.data(), bytes) == 0 && low == other.low;
    }
};

struct Case {
    int grad_dtype, low_dtype, master_from;
    bool is_decoupled;
};

static tm_adam_scalars scalars_of(bool is_decoupled) {
    return {3e-4 / (1 - 0.9),   0.9,  0.95,         1e-8, is_decoupled ? 1 - 3e-4 * 0.1 : 0.1,
            1 / sqrt(1 - 0.95), 0.37, is_decoupled, 0};
}

static void step(tm_workers *workers, State *s, const Case &c) {
    const tm_adam_scalars scalars = scalars_of(c.is_decoupled);
    const int low = c.low_dtype != TM_NONE ? c.low_dtype : c.master_from;
    CHECK_EQUAL(tm_adam_step(workers, N, &s->master[1], &s->m[1], &s->v[1],
                             tm_dtype_at(s->grad.data(), c.grad_dtype, 1), c.grad_dtype,
                             low == TM_NONE ? nullptr : tm_dtype_at(s->low.data(), low, 1), c.low_dtype, c.master_from,
                             &scalars),
                0);
}

static float float_at(const std::vector<char> &data, int dtype, uint64_t i) {
    if (dtype == TM_F32) {
        float x;
        memcpy(&x, &data[i * 4], 4);
        return x;
    }
    uint16_t half;
    memcpy(&half, &data[i * 2], 2);
    return dtype == TM_BF16 ? widen_reference(half, 7, 8) : widen_reference(half, 10, 5);
}

// The header's formula, one element at a time, in the same fp32 operations.
static void step_reference(State *s, const Case &c) {
    const tm_adam_scalars d = scalars_of(c.is_decoupled);
    for (uint64_t i = 1; i <= N; ++i) {
        float g = float_at(s->grad, c.grad_dtype, i) * (float)d.grad_scale;
        float p = s->master[i], m = s->m[i], v = s->v[i];
        if (c.master_from != TM_NONE) {
            p = float_at(s->low, c.master_from, i);
            m = v = 0;
        }
        if (c.is_decoupled)
            p = p * (float)d.decay;
        else
            g = g + (float)d.decay * p;
        m = m + (g - m) * (float)(1 - d.beta1);
        v = v * (float)d.beta2 + (g * g) * (float)(1 - d.beta2);
        p = p - (float)d.step_size * (m / (sqrtf(v) * (float)d.inv_sqrt_bias2 + (float)d.eps));
        s->master[i] = p;
        s->m[i] = m;
        s->v[i] = v;
        if (c.low_dtype == TM_NONE)
            continue;
        const uint16_t half = c.low_dtype == TM_BF16 ? narrow_reference(p, 7, 8) : narrow_reference(p, 10, 5);
        if (c.low_dtype == TM_F32)
            memcpy(&s->low[i * 4], &p, 4);
        else
            memcpy(&s->low[i * 2], &half, 2);
    }
}

static void the_step_is_the_formula_on_every_isa_and_thread_count(const std::vector<int> &isas, const Case &c) {
    const int low = c.low_dtype != TM_NONE ? c.low_dtype : c.master_from;
    State wanted(c.grad_dtype, low, 11);
    step_reference(&wanted, c);
    for (int isa : isas)
        for (uint32_t num_threads : {1u, 2u, 3u}) {
            CHECK_EQUAL(tm_isa_choose(isa), isa);
            tm_workers *workers;
            CHECK_EQUAL(tm_workers_open(num_threads, &workers), 0);
            State seen(c.grad_dtype, low, 11);
            step(workers, &seen, c);
            CHECK(seen == wanted);
            CHECK_EQUAL(tm_workers_close(workers), 0);
        }
}

// Against double arithmetic: fp32 rounding of a handful of operations, no more.
static void the_step_is_close_to_doubles() {
    const Case c = {TM_F32, TM_NONE, TM_NONE, true};
    State before(TM_F32, TM_NONE, 12), after(TM_F32, TM_NONE, 12);
    step(nullptr, &after, c);
    const tm_adam_scalars d = scalars_of(true);
    for (uint64_t i = 1; i <= N; ++i) {
        const double g = (double)float_at(before.grad, TM_F32, i) * d.grad_scale;
        const double m = before.m[i] + (g - before.m[i]) * (1 - d.beta1);
        const double v = before.v[i] * d.beta2 + g * g * (1 - d.beta2);
        const double p = before.master[i] * d.decay - d.step_size * (m / (sqrt(v) * d.inv_sqrt_bias2 + d.eps));
        CHECK(fabs(after.m[i] - m) <= 1e-6 * (fabs(before.m[i]) + fabs(g)) + 1e-45);
        CHECK(fabs(after.v[i] - v) <= 1e-6 * v + 1e-44);
        // m / sqrt(v) is ill-conditioned where v is a denormal.
        CHECK(v < 1e-38 || fabs(after.master[i] - p) <= 2e-7 * (fabs(p) + 1e-2));
    }
}

static void nan_and_infinity_are_kept(int isa) {
    CHECK_EQUAL(tm_isa_choose(isa), isa);
    State s(TM_F32, TM_BF16, 13);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    memcpy(&s.grad[4 * 10], bad, sizeof bad);
    step(nullptr, &s, {TM_F32, TM_BF16, TM_NONE, true});
    for (int i = 10; i < 13; ++i) {
        CHECK(isnan(s.master[i]));
        CHECK(isnan(float_at(s.low, TM_BF16, (uint64_t)i)));
    }
    CHECK(!isnan(s.master[13]));
}

static void the_callers_float_mode_is_neither_used_nor_changed() {
#if defined(__x86_64__)
    State wanted(TM_F32, TM_NONE, 14), seen(TM_F32, TM_NONE, 14), shared(TM_F32, TM_NONE, 14);
    const Case c = {TM_F32, TM_NONE, TM_NONE, true};
    step(nullptr, &wanted, c);
    const unsigned before = _mm_getcsr();
    const unsigned flushing = 0x1F80 | 0x8040 | 0x2000; // denormals flushed, rounding down
    _mm_setcsr(flushing);
    step(nullptr, &seen, c);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    CHECK_EQUAL(after, flushing);
    CHECK(seen == wanted);
    tm_workers *workers; // threads born under a strange mode do not keep it
    _mm_setcsr(flushing);
    CHECK_EQUAL(tm_workers_open(3, &workers), 0);
    step(workers, &shared, c);
    CHECK_EQUAL(tm_workers_close(workers), 0);
    _mm_setcsr(before);
    CHECK(shared == wanted);
#endif
}

static void bad_arguments_are_refused() {
    State s(TM_F32, TM_NONE, 15);
    const tm_adam_scalars d = scalars_of(true);
    float *p = s.master.data(), *m = s.m.data(), *v = s.v.data();
    const void *g = s.grad.data();
    CHECK_EQUAL(tm_adam_step(nullptr, 4, p, m, v, g, TM_NONE, nullptr, TM_NONE, TM_NONE, &d), -EINVAL);
    CHECK_EQUAL(tm_adam_step(nullptr, 4, p, m, v, nullptr, TM_F32, nullptr, TM_NONE, TM_NONE, &d), -EINVAL);
    CHECK_EQUAL(tm_adam_step(nullptr, 4, p, m, v, g, TM_F32, nullptr, TM_BF16, TM_NONE, &d), -EINVAL);
    CHECK_EQUAL(tm_adam_step(nullptr, 4, p, m, v, g, TM_F32, s.low.data(), TM_BF16, TM_F16, &d), -EINVAL);
    CHECK_EQUAL(tm_adam_step(nullptr, 4, p, m, v, g, TM_F32, nullptr, TM_NONE, TM_NONE, nullptr), -EINVAL);
    CHECK_EQUAL(tm_adam_step(nullptr, 0, p, m, v, g, TM_F32, nullptr, TM_NONE, TM_NONE, &d), 0);
    tm_workers *workers;
    CHECK_EQUAL(tm_workers_open(0, &workers), -EINVAL);
    CHECK_EQUAL(tm_workers_open(2, nullptr), -EINVAL);
}

int main() {
    const std::vector<int> isas = find_isas();
    for (int isa : isas)
        for (int dtype : {TM_BF16, TM_F16}) {
            RUN(every_half_widens_exactly, isa, dtype);
            RUN(floats_narrow_to_the_nearest_even, isa, dtype);
        }
    for (int grad : {TM_F32, TM_BF16, TM_F16})
        for (int low : {TM_NONE, TM_F32, TM_BF16, TM_F16})
            for (bool is_decoupled : {true, false})
                RUN(the_step_is_the_formula_on_every_isa_and_thread_count, isas, {grad, low, TM_NONE, is_decoupled});
    for (int from : {TM_F32, TM_BF16, TM_F16})
        for (int low : {(int)TM_NONE, from})
            RUN(the_step_is_the_formula_on_every_isa_and_thread_count, isas, {TM_BF16, low, from, true});
    RUN(the_step_is_close_to_doubles);
    for (int isa : isas)
        RUN(nan_and_infinity_are_kept, isa);
    tm_isa_choose(-1);
    RUN(the_callers_float_mode_is_neither_used_nor_changed);
    RUN(bad_arguments_are_refused);
}
