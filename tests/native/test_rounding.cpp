// Is stochastic rounding unbiased, even over steps, and harmless to what must not be rounded?
//
// Statistics are over a fixed key, so a run is like any other. Bounds are 5 standard deviations: right code fails one
// of the few hundred checks with a chance below 1 in 5,000, had the key been drawn anew.

#include "reference.h"
#include "rounding.h"

static const uint64_t N = 1 << 18;

static std::vector<uint32_t> words_of(int isa, uint64_t key, uint64_t step, int part, uint64_t element, uint64_t n) {
    std::vector<uint32_t> words(n);
    const tm_dither dither = tm_dither_at(key, step, part, element);
    loops_of(isa)->random_words(n, &dither, words.data());
    return words;
}

static double mean_after(int isa, int dtype, float x, const std::vector<uint32_t> &words, float beside) {
    const uint64_t n = words.size();
    std::vector<float> values(n, x), after(n);
    std::vector<char> data(n * 2);
    std::vector<uint8_t> scales(n / TM_Q8_BLOCK + 1);
    if (dtype == TM_Q8 || dtype == TM_Q8_POSITIVE)
        for (uint64_t i = 0; i < n; i += TM_Q8_BLOCK)
            values[i] = beside; // sets the block's scale
    const tm_loops *loops = loops_of(isa);
    if (dtype == TM_BF16)
        loops->dither_bf16(n, values.data(), words.data(), (uint16_t *)data.data());
    else if (dtype == TM_F16)
        loops->dither_f16(n, values.data(), words.data(), (uint16_t *)data.data());
    else
        (dtype == TM_Q8 ? loops->narrow_q8 : loops->narrow_q8_positive)(n, values.data(), words.data(),
                                                                        (uint8_t *)data.data(), scales.data());
    const tm_part part = {data.data(), scales.data(), dtype, 0};
    tm_isa_choose(isa);
    CHECK_EQUAL(tm_part_widen(nullptr, n, &part, nullptr, after.data()), 0);
    double sum = 0;
    uint64_t count = 0;
    for (uint64_t i = 0; i < n; ++i)
        if (dtype == TM_BF16 || dtype == TM_F16 || i % TM_Q8_BLOCK != 0) {
            sum += after[i];
            ++count;
        }
    return sum / (double)count;
}

// The distance of the two stored numbers round x.
static double unit_at(double x, int mantissa_bits, double least_normal) {
    int exponent;
    frexp(fmax(fabs(x), least_normal), &exponent);
    return ldexp(1.0, exponent - 1 - mantissa_bits);
}

static void the_mean_is_the_number(int isa, int dtype) {
    const int mantissa_bits = dtype == TM_BF16 ? 7 : dtype == TM_F16 ? 10 : 3;
    const double least_normal = dtype == TM_BF16  ? ldexp(1, -126)
                                : dtype == TM_F16 ? ldexp(1, -14)
                                : dtype == TM_Q8  ? ldexp(1, -14)
                                                  : ldexp(1, -30);
    Numbers numbers{3};
    for (int k = 0; k < 40; ++k) {
        const int lowest = dtype == TM_BF16 ? -30 : dtype == TM_F16 ? -22 : dtype == TM_Q8 ? -16 : -30;
        double x = ldexp(fabs(numbers.uniform()), -(int)(numbers.next() % (uint64_t)-lowest));
        x = k % 2 && dtype != TM_Q8_POSITIVE ? -x : x;
        const float given = (float)x;
        const double unit = unit_at(given, mantissa_bits, least_normal);
        if (dtype == TM_Q8_POSITIVE && given < ldexpf(1.125f, -31))
            continue; // never 0: the smallest code has a bias, and is meant to
        const auto words = words_of(isa, (uint64_t)k, 5, k % 4, 17, N);
        const double share = fabs(given) / unit - floor(fabs(given) / unit);
        const double allowed = unit * (5 * sqrt(share * (1 - share) / (double)N) + 4.0 / 65536);
        CHECK(fabs(mean_after(isa, dtype, given, words, 1.0f) - given) <= allowed);
    }
}

static void denormal_bf16_is_unbiased(int isa) {
    const float x = float_of(0x00123456u);
    const double unit = ldexp(1, -133), share = (double)x / unit - floor((double)x / unit);
    const double mean = mean_after(isa, TM_BF16, x, words_of(isa, 1, 2, 0, 0, N), 0);
    CHECK(fabs(mean - (double)x) <= 5 * unit * sqrt(share * (1 - share) / (double)N));
}

// Over steps a share is met as often as it says, to within a few steps: a random walk would be at 30 by then.
static void steps_share_out_evenly(int part) {
    const uint32_t limits[] = {0x00800000u, 0x10000000u, 0x55555555u, 0x80000000u, 0xe0000000u};
    for (uint64_t element : {0ull, 1ull, 12345ull, 1ull << 40})
        for (uint32_t limit : limits) {
            uint64_t below = 0;
            for (uint64_t step = 1; step <= 4096; ++step) {
                below += words_of(0, 9, step, part, element, 1)[0] < limit;
                CHECK(fabs((double)below - (double)step * limit / 4294967296.0) < 7);
            }
        }
}

static double correlation(const std::vector<uint32_t> &a, const std::vector<uint32_t> &b, uint64_t shift) {
    double sum = 0;
    const uint64_t n = a.size() - shift;
    for (uint64_t i = 0; i < n; ++i)
        sum += ((a[i] >> 16) / 65536.0 - 0.5) * ((b[i + shift] >> 16) / 65536.0 - 0.5);
    return sum / (double)n * 12;
}

static void elements_parts_and_keys_are_independent() {
    const double bound = 5 / sqrt((double)N);
    for (int part = 0; part < 4; ++part) {
        const auto words = words_of(0, 21, 3, part, 0, N);
        for (uint64_t shift : {1, 2, 3, 16, 64, 1000, 4096})
            CHECK(fabs(correlation(words, words, shift)) < bound);
        for (int other = 0; other < part; ++other)
            CHECK(fabs(correlation(words, words_of(0, 21, 3, other, 0, N), 0)) < bound);
        for (uint64_t key : {0ull, 20ull, 22ull, 21ull + (1ull << 32), 21ull << 40})
            CHECK(fabs(correlation(words, words_of(0, key, 3, part, 0, N), 0)) < bound);
        CHECK(fabs(correlation(words, words_of(0, 21, 3, part, 1ull << 32, N), 0)) < bound);
    }
}

// Counts in 256 classes: chi squared has 255 degrees of freedom, a standard deviation of 22.6.
static void words_are_uniform() {
    for (int part = 0; part < 4; ++part)
        for (uint64_t key = 0; key < 8; ++key) {
            double counts[256] = {0}, sum = 0;
            for (uint32_t word : words_of(0, key, 1, part, key * 1000, N))
                counts[word >> 24] += 1;
            for (double count : counts)
                sum += (count - N / 256.0) * (count - N / 256.0) / (N / 256.0);
            CHECK(sum < 255 + 5 * 22.6);
        }
}

static void what_cannot_be_rounded_stays(int isa, int dtype) {
    std::vector<float> floats; // numbers that the dtype holds, infinities and zeros among them
    for (uint32_t half = 0; half < 65536; ++half)
        floats.push_back(widen_half((uint16_t)half, dtype));
    for (uint32_t word : {0u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
        const std::vector<uint32_t> words(65536, word);
        std::vector<uint16_t> halves(65536);
        const tm_loops *loops = loops_of(isa);
        (dtype == TM_BF16 ? loops->dither_bf16 : loops->dither_f16)(65536, floats.data(), words.data(), halves.data());
        for (uint32_t half = 0; half < 65536; ++half)
            CHECK(is_nan_half((uint16_t)half, dtype) ? is_nan_half(halves[half], dtype) : halves[half] == half);
    }
}

static void chance_makes_no_infinity(int isa, int dtype) {
    std::vector<float> floats;
    const uint32_t largest = dtype == TM_BF16 ? 0x7f7f0000u : 0x477fe000u;
    for (uint32_t bits = largest - 0x20000; bits < largest + 0x20000; ++bits)
        floats.push_back(float_of(bits | (bits & 1) << 31));
    const size_t n = floats.size();
    const std::vector<uint32_t> words(n, 0); // rounds up whatever can be
    std::vector<uint16_t> halves(n);
    (dtype == TM_BF16 ? loops_of(isa)->dither_bf16 : loops_of(isa)->dither_f16)(n, floats.data(), words.data(),
                                                                                halves.data());
    const uint16_t infinity = dtype == TM_BF16 ? 0x7f80 : 0x7c00;
    for (size_t i = 0; i < n; ++i) {
        const bool is_nearest_infinite = (narrow_half(floats[i], dtype) & 0x7fff) == infinity;
        CHECK(((halves[i] & 0x7fff) == infinity) == is_nearest_infinite || isnan(floats[i]));
        CHECK_EQUAL(halves[i] >> 15, bits_of(floats[i]) >> 31);
    }
}

static void a_second_moment_that_is_not_zero_never_becomes_zero(int isa) {
    std::vector<float> values(128, 0.0f), after(128);
    std::vector<uint32_t> words(128, 0xffffffffu); // rounds down
    values[0] = 1.0f;
    values[1] = 1e-12f; // far below the smallest code
    values[2] = 1e-44f;
    values[100] = 1e-44f; // the largest of its block
    uint8_t codes[128], scales[2];
    for (const uint32_t *drawn : {(const uint32_t *)nullptr, (const uint32_t *)words.data()}) {
        loops_of(isa)->narrow_q8_positive(128, values.data(), drawn, codes, scales);
        loops_of(isa)->widen_q8_positive(128, codes, scales, after.data());
        for (int i = 0; i < 128; ++i)
            CHECK((values[(size_t)i] > 0) == (after[(size_t)i] > 0));
        CHECK(after[1] >= values[1] && after[2] >= values[2]);
    }
}

int main() {
    for (int isa : find_isas()) {
        for (int dtype : {TM_BF16, TM_F16, TM_Q8, TM_Q8_POSITIVE})
            RUN(the_mean_is_the_number, isa, dtype);
        RUN(denormal_bf16_is_unbiased, isa);
        for (int dtype : {TM_BF16, TM_F16}) {
            RUN(what_cannot_be_rounded_stays, isa, dtype);
            RUN(chance_makes_no_infinity, isa, dtype);
        }
        RUN(a_second_moment_that_is_not_zero_never_becomes_zero, isa);
    }
    for (int part = 0; part < 4; ++part)
        RUN(steps_share_out_evenly, part);
    RUN(elements_parts_and_keys_are_independent);
    RUN(words_are_uniform);
}
