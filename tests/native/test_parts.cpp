// Is every stored form what its description says, to and from fp32, from every instruction set?

#include "reference.h"

static void every_half_widens_exactly(int isa, int dtype) {
    std::vector<uint16_t> halves(65536);
    std::vector<float> floats(65536);
    for (uint32_t i = 0; i < 65536; ++i)
        halves[i] = (uint16_t)i;
    (dtype == TM_BF16 ? loops_of(isa)->widen_bf16 : loops_of(isa)->widen_f16)(65536, halves.data(), floats.data());
    for (uint32_t i = 0; i < 65536; ++i) {
        const float wanted = widen_half((uint16_t)i, dtype);
        CHECK(isnan(wanted) ? isnan(floats[i]) : bits_of(floats[i]) == bits_of(wanted));
    }
}

// Every upper half, with lower halves that decide ties, and some by chance.
static std::vector<float> telling_floats() {
    std::vector<float> floats;
    Numbers numbers{5};
    for (uint32_t upper = 0; upper < 65536; ++upper)
        for (uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, (uint32_t)numbers.next() >> 16,
                               0x1000u, 0x0fffu, 0x1001u, 0x3000u})
            floats.push_back(float_of(upper << 16 | lower));
    return floats;
}

static void floats_narrow_to_the_nearest_even(int isa, int dtype) {
    const std::vector<float> floats = telling_floats();
    std::vector<uint16_t> halves(floats.size());
    tm_dtype_narrow(loops_of(isa), dtype, floats.size(), floats.data(), halves.data());
    for (size_t i = 0; i < floats.size(); ++i)
        CHECK(isnan(floats[i]) ? is_nan_half(halves[i], dtype) : halves[i] == narrow_half(floats[i], dtype));
}

// ---- split ---------------------------------------------------------------------------------------------------------

static tm_part part_of(void *data, int dtype, uint8_t *scales = nullptr) { return {data, scales, dtype, 0}; }

static void check_split(uint32_t first, uint64_t stride, uint64_t n) {
    std::vector<float> before(n), after(n);
    std::vector<uint16_t> weight(n), low(n);
    for (uint64_t i = 0; i < n; ++i)
        before[i] = float_of(first + (uint32_t)(i * stride));
    const tm_part part = part_of(low.data(), TM_SPLIT);
    CHECK_EQUAL(tm_part_narrow(nullptr, n, before.data(), &part, weight.data()), 0);
    CHECK_EQUAL(tm_part_widen(nullptr, n, &part, weight.data(), after.data()), 0);
    for (uint64_t i = 0; i < n; ++i) {
        const uint32_t given = first + (uint32_t)(i * stride);
        const uint32_t bits =
            (given & 0x7fffffffu) >= 0x7fff8000u ? given & ~0x8000u : given; // its weight would be zero
        CHECK_EQUAL(bits_of(after[i]), bits);
        const float shown = widen_half(weight[i], TM_BF16), x = before[i];
        CHECK_EQUAL(low[i], bits & 0xffff);
        if (isnan(x) || (bits & 0xffff) == 0x8000) // a NaN shows as anything; a tie goes away from zero
            continue;
        CHECK(bits_of(shown) == bits_of(widen_half(narrow_half(x, TM_BF16), TM_BF16)));
    }
}

static void split_keeps_every_pattern(int isa) {
    CHECK_EQUAL(tm_isa_choose(isa), isa);
    check_split(0, 1, 1 << 17);                   // zero and denormals
    check_split(0x7f7f0000u - 70000, 1, 1 << 18); // the largest numbers, infinity, NaN
    check_split(0xff7f0000u - 70000, 1, 1 << 18);
    check_split(0xffff0000u, 1, 1 << 17); // the last NaN, and round to zero again
    check_split(12345, 4099, 1 << 20);    // everywhere
}

// A negative low half is left beside a weight that was overwritten by zero; a positive one is a denormal number.
static void a_zeroed_weight_is_zero(int isa) {
    CHECK_EQUAL(tm_isa_choose(isa), isa);
    const uint64_t n = 2 << 16;
    std::vector<uint16_t> weight(n), low(n);
    std::vector<float> values(n);
    for (uint64_t i = 0; i < n; ++i) {
        weight[i] = i % 2 ? 0x8000 : 0;
        low[i] = (uint16_t)(i / 2);
    }
    const tm_part part = part_of(low.data(), TM_SPLIT);
    CHECK_EQUAL(tm_part_widen(nullptr, n, &part, weight.data(), values.data()), 0);
    for (uint64_t i = 0; i < n; ++i)
        CHECK_EQUAL(bits_of(values[i]), ((uint32_t)weight[i] << 16) + (low[i] < 0x8000 ? low[i] : 0));
}

static void split_shows_ties_away_from_zero() {
    const float x[] = {float_of(0x3f808000u), float_of(0x3f818000u), float_of(0xbf808000u), float_of(0x7f7f8000u),
                       float_of(0x7f7f7fffu)};
    const uint16_t wanted[] = {0x3f81, 0x3f82, 0xbf81, 0x7f80, 0x7f7f}; // a finite one shows as infinity
    uint16_t weight[5], low[5];
    const tm_part part = part_of(low, TM_SPLIT);
    CHECK_EQUAL(tm_part_narrow(nullptr, 5, x, &part, weight), 0);
    CHECK(memcmp(weight, wanted, sizeof wanted) == 0);
}

// ---- 8 bits --------------------------------------------------------------------------------------------------------

// The number that a code stands for, by the table in loops_q8.h.
static double q8_reference(int code, int scale, bool is_signed) {
    if (scale == 255)
        return NAN;
    const int top = is_signed ? 15 : 31, size = is_signed ? code & 0x7f : code;
    const int exponent = size >> 3, mantissa = size & 7;
    if (scale == 0 || size == 0)
        return 0;
    const bool is_denormal = is_signed && exponent == 0;
    const double x = is_denormal ? ldexp(mantissa, 1 - top - 3) : ldexp(8 + mantissa, exponent - top - 3);
    return (is_signed && code & 0x80 ? -x : x) * ldexp(1, scale - 127);
}

static void every_code_widens_exactly(int isa, int dtype) {
    CHECK_EQUAL(tm_isa_choose(isa), isa);
    for (int scale : {0, 48, 49, 100, 127, 200, 253, 255}) {
        std::vector<uint8_t> codes(256), scales(4, (uint8_t)scale);
        std::vector<float> floats(256);
        for (int i = 0; i < 256; ++i)
            codes[(size_t)i] = (uint8_t)i;
        const tm_part part = part_of(codes.data(), dtype, scales.data());
        CHECK_EQUAL(tm_part_widen(nullptr, 256, &part, nullptr, floats.data()), 0);
        for (int i = 0; i < 256; ++i) {
            const double wanted = q8_reference(i, scale, dtype == TM_Q8), seen = (double)floats[(size_t)i];
            CHECK(isnan(wanted) ? isnan(seen) : seen == wanted);
        }
    }
}

static void bytes_never_written_read_as_zero(int isa, int dtype) {
    CHECK_EQUAL(tm_isa_choose(isa), isa);
    uint8_t codes[100] = {0}, scales[2] = {0};
    float floats[100];
    const tm_part part = part_of(codes, dtype, scales);
    CHECK_EQUAL(tm_part_widen(nullptr, 100, &part, nullptr, floats), 0);
    for (float x : floats)
        CHECK_EQUAL(bits_of(x), 0);
}

// Blocks of many ranges; n leaves a short last block.
static std::vector<float> spread_floats(uint64_t n, bool is_signed) {
    std::vector<float> floats(n);
    Numbers numbers{31};
    for (uint64_t i = 0; i < n; ++i) {
        const int range = (int)(i / 64 % 40), exponent = (int)(i / 64 % 200) - 79;
        const float x = ldexpf(numbers.uniform(), exponent - (int)(numbers.next() % (uint64_t)(range + 1)));
        floats[i] = is_signed ? x : fabsf(x);
        if (numbers.next() % 50 == 0)
            floats[i] = 0;
    }
    return floats;
}

static void check_nearest_code(double x, double seen, double scale, int code, bool is_signed) {
    const double least = ldexp(scale, is_signed ? -17 : -34), largest = scale * (is_signed ? 1.875 : 1.75);
    int exponent;
    frexp(fabs(x), &exponent);
    const double unit = fmax(least, ldexp(1.0, exponent - 1 - 3));
    CHECK(fabs(x) <= largest);
    CHECK(fabs(seen - x) <= unit / 2 || (!is_signed && x > 0 && code == 1));
    CHECK((x == 0) == (seen == 0) || (is_signed && fabs(x) <= least / 2));
    CHECK(seen * x >= 0);
}

static void floats_become_the_nearest_code(int isa, int dtype) {
    CHECK_EQUAL(tm_isa_choose(isa), isa);
    const bool is_signed = dtype == TM_Q8;
    const uint64_t n = 64 * 1500 + 37;
    const std::vector<float> before = spread_floats(n, is_signed);
    std::vector<uint8_t> codes(n), scales(n / 64 + 1);
    std::vector<float> after(n), again(n);
    const tm_part part = part_of(codes.data(), dtype, scales.data());
    CHECK_EQUAL(tm_part_narrow(nullptr, n, before.data(), &part, nullptr), 0);
    CHECK_EQUAL(tm_part_widen(nullptr, n, &part, nullptr, after.data()), 0);
    for (uint64_t i = 0; i < n; ++i)
        check_nearest_code(before[i], after[i], ldexp(1, scales[i / 64] - 127), codes[i], is_signed);
    CHECK_EQUAL(tm_part_narrow(nullptr, n, after.data(), &part, nullptr), 0); // what was rounded stays
    CHECK_EQUAL(tm_part_widen(nullptr, n, &part, nullptr, again.data()), 0);
    CHECK(memcmp(after.data(), again.data(), n * sizeof(float)) == 0);
}

// One of 64 numbers decides whether its block is sound; the next block always is.
static void a_block_shows_what_it_cannot_hold(int isa, int dtype) {
    CHECK_EQUAL(tm_isa_choose(isa), isa);
    const float bad[] = {NAN, -NAN, float_of(0x7f800001u), INFINITY, -INFINITY, 3.4e38f, -1.0f, -0.0f, 1e38f};
    for (float one : bad) {
        std::vector<float> x(70, 1.0f);
        x[13] = one;
        uint8_t codes[70], scales[2];
        const tm_part part = part_of(codes, dtype, scales);
        CHECK_EQUAL(tm_part_narrow(nullptr, 70, x.data(), &part, nullptr), 0);
        CHECK_EQUAL(tm_part_widen(nullptr, 70, &part, nullptr, x.data()), 0);
        const bool is_sound = one == 0 || one == 1e38f || (one == -1.0f && dtype == TM_Q8);
        for (int i = 0; i < 64; ++i)
            CHECK(isnan(x[(size_t)i]) == !is_sound);
        CHECK(one != 0 || (x[0] == 1.0f && x[13] == 0));
        CHECK(x[64] == 1.0f && x[69] == 1.0f);
    }
}

static void bad_arguments_are_refused() {
    float x[4] = {0};
    uint16_t half[4];
    const tm_part none = part_of(half, TM_NONE), split = part_of(half, TM_SPLIT), q8 = part_of(half, TM_Q8);
    const tm_part nowhere = part_of(nullptr, TM_F32);
    for (const tm_part *part : {&none, &split, &q8, &nowhere, (const tm_part *)nullptr}) {
        CHECK_EQUAL(tm_part_widen(nullptr, 4, part, nullptr, x), -EINVAL);
        CHECK_EQUAL(tm_part_narrow(nullptr, 4, x, part, nullptr), -EINVAL);
        CHECK_EQUAL(tm_part_narrow(nullptr, 0, x, part, nullptr), 0);
    }
}

int main() {
    for (int isa : find_isas()) {
        for (int dtype : {TM_BF16, TM_F16}) {
            RUN(every_half_widens_exactly, isa, dtype);
            RUN(floats_narrow_to_the_nearest_even, isa, dtype);
        }
        RUN(split_keeps_every_pattern, isa);
        RUN(a_zeroed_weight_is_zero, isa);
        for (int dtype : {TM_Q8, TM_Q8_POSITIVE}) {
            RUN(every_code_widens_exactly, isa, dtype);
            RUN(bytes_never_written_read_as_zero, isa, dtype);
            RUN(floats_become_the_nearest_code, isa, dtype);
            RUN(a_block_shows_what_it_cannot_hold, isa, dtype);
        }
    }
    RUN(split_shows_ties_away_from_zero);
    RUN(bad_arguments_are_refused);
}
