// Are frozen weights in blocks what tiermem.h says, from every instruction set, in any dtype and number of elements?

#include "reference.h"

static const uint64_t BLOCK = TM_WEIGHT_BLOCK;
static const int KINDS[] = {TM_INT8, TM_NF4};

// By Dettmers et al. 2023, appendix E, as loops_blocks.h has them.
static const float LEVELS[] = {-1.0f,
                               -0.6961928009986877f,
                               -0.5250730514526367f,
                               -0.39491748809814453f,
                               -0.28444138169288635f,
                               -0.18477343022823334f,
                               -0.09105003625154495f,
                               0.0f,
                               0.07958029955625534f,
                               0.16093020141124725f,
                               0.24611230194568634f,
                               0.33791524171829224f,
                               0.44070982933044434f,
                               0.5626170039176941f,
                               0.7229568362236023f,
                               1.0f};

struct Blocks {
    int kind;
    uint64_t n;
    std::vector<uint8_t> codes;
    std::vector<float> scales;

    Blocks(int kind, uint64_t n)
        : kind(kind), n(n), codes((n + BLOCK - 1) / BLOCK * BLOCK * (unsigned)kind / 8),
          scales((n + BLOCK - 1) / BLOCK) {}

    int pack(const void *values, int dtype) {
        return tm_blocks_pack(nullptr, kind, n, values, dtype, codes.data(), scales.data());
    }

    int unpack(void *values, int dtype) const {
        return tm_blocks_unpack(nullptr, kind, n, codes.data(), scales.data(), values, dtype);
    }

    // The value of an element, by the description.
    float value(uint64_t i) const {
        const float scale = scales[i / BLOCK];
        if (kind == TM_INT8)
            return (float)(int8_t)codes[i] * scale;
        return LEVELS[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4] * scale;
    }

    // Half the distance of the two values around a number of the block, at most.
    double room(uint64_t i) const { return scales[i / BLOCK] * (kind == TM_INT8 ? 0.5000001 : 0.152); }
};

static std::vector<float> some_floats(uint64_t n) {
    std::vector<float> floats(n);
    Numbers numbers{7};
    for (uint64_t i = 0; i < n; ++i)
        floats[i] = ldexpf(numbers.uniform(), (int)(i / BLOCK % 60) - 40) * (numbers.next() % 9 ? 1.0f : 0.0f);
    return floats;
}

static void floats_become_the_nearest_value(int isa, int kind) {
    CHECK_EQUAL(tm_isa_choose(isa), isa);
    for (uint64_t n : {1ull, 63ull, 64ull, 65ull, 1024ull, 1089ull, 65536ull + 5, 3 * 65536ull + 1000}) {
        const std::vector<float> before = some_floats(n);
        std::vector<float> after(n);
        Blocks blocks(kind, n), plain(kind, n);
        CHECK_EQUAL(blocks.pack(before.data(), TM_F32), 0);
        CHECK_EQUAL(blocks.unpack(after.data(), TM_F32), 0);
        for (uint64_t i = 0; i < n; ++i) {
            CHECK(bits_of(after[i]) == bits_of(blocks.value(i)));
            CHECK(fabs((double)after[i] - (double)before[i]) <= blocks.room(i));
            CHECK(before[i] != 0 || after[i] == 0);
        }
        tm_isa_choose(0);
        CHECK_EQUAL(plain.pack(before.data(), TM_F32), 0);
        CHECK(plain.codes == blocks.codes && plain.scales == blocks.scales);
        CHECK_EQUAL(tm_isa_choose(isa), isa);
    }
}

static void other_dtypes_are_rounded_once(int isa, int kind) {
    CHECK_EQUAL(tm_isa_choose(isa), isa);
    const uint64_t n = 65536 + 37;
    const std::vector<float> before = some_floats(n);
    for (int dtype : {TM_BF16, TM_F16}) {
        std::vector<uint16_t> given(n), seen(n), wanted(n);
        std::vector<float> wide(n);
        Blocks blocks(kind, n), of_wide(kind, n);
        tm_dtype_narrow(loops_of(isa), dtype, n, before.data(), given.data());
        tm_dtype_widen(loops_of(isa), dtype, n, given.data(), wide.data());
        CHECK_EQUAL(blocks.pack(given.data(), dtype), 0);
        CHECK_EQUAL(of_wide.pack(wide.data(), TM_F32), 0);
        CHECK(blocks.codes == of_wide.codes && blocks.scales == of_wide.scales);
        CHECK_EQUAL(blocks.unpack(seen.data(), dtype), 0);
        CHECK_EQUAL(blocks.unpack(wide.data(), TM_F32), 0);
        tm_dtype_narrow(loops_of(isa), dtype, n, wide.data(), wanted.data());
        CHECK(seen == wanted);
    }
}

// One of 64 numbers decides whether its block is sound; the next block always is.
static void a_block_shows_what_it_cannot_hold(int isa, int kind) {
    CHECK_EQUAL(tm_isa_choose(isa), isa);
    for (float one : {NAN, INFINITY, -INFINITY, 1.0f, -0.0f, float_of(1)}) {
        std::vector<float> x(70, one == 1.0f ? 1.0f : 0.0f);
        x[13] = one;
        x[69] = 3.0f;
        Blocks blocks(kind, 70);
        CHECK_EQUAL(blocks.pack(x.data(), TM_F32), 0);
        CHECK_EQUAL(blocks.unpack(x.data(), TM_F32), 0);
        for (int i = 0; i < 64; ++i)
            CHECK(isnan(x[(size_t)i]) == !isfinite(one));
        CHECK(x[69] == 3.0f);
    }
}

static void bad_arguments_are_refused() {
    float x[64] = {0}, scale[1];
    uint8_t codes[64];
    CHECK_EQUAL(tm_blocks_pack(nullptr, 5, 64, x, TM_F32, codes, scale), -EINVAL);
    for (int kind : KINDS) {
        CHECK_EQUAL(tm_blocks_pack(nullptr, kind, 64, nullptr, TM_F32, codes, scale), -EINVAL);
        CHECK_EQUAL(tm_blocks_pack(nullptr, kind, 64, x, TM_SPLIT, codes, scale), -EINVAL);
        CHECK_EQUAL(tm_blocks_unpack(nullptr, kind, 64, codes, nullptr, x, TM_F32), -EINVAL);
        CHECK_EQUAL(tm_blocks_unpack(nullptr, kind, 0, nullptr, nullptr, nullptr, TM_F32), 0);
    }
}

int main() {
    for (int isa : find_isas())
        for (int kind : KINDS) {
            RUN(floats_become_the_nearest_value, isa, kind);
            RUN(other_dtypes_are_rounded_once, isa, kind);
            RUN(a_block_shows_what_it_cannot_hold, isa, kind);
        }
    RUN(bad_arguments_are_refused);
}
